/** The last request in other languages. */

import { hasKey, jsonWithSeed } from "./api.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const OWN = ["speculation", "return_drafts", "return_token_ids"];

/** Return the request as a command or a program. `language` is curl, python or grpcurl. */
export function snippet(language, body, seed, grpcPort) {
  return { curl, python, grpcurl }[language](body, seed, grpcPort);
}

function base() {
  return new URL("v1", document.baseURI).href;
}

function curl(body, seed) {
  const key = hasKey() ? ` \\\n  -H "authorization: Bearer $PILOTFISH_API_KEY"` : "";
  const data = quoted(jsonWithSeed(body, seed, 2));
  return `curl -N ${base()}/chat/completions \\\n  -H 'content-type: application/json'${key} \\\n  -d ${data}`;
}

function python(body, seed) {
  const { model, messages, temperature, max_tokens: tokens } = body;
  const extra = Object.fromEntries(OWN.filter((name) => name in body).map((name) => [name, body[name]]));
  const literal = (value) =>
    JSON.stringify(value, null, 4)
      .replaceAll(/\btrue\b(?=[,\n}])/g, "True")
      .replaceAll(/\bfalse\b(?=[,\n}])/g, "False")
      .replaceAll("\n", "\n    ");
  return `from openai import OpenAI

client = OpenAI(base_url="${base()}", api_key="${hasKey() ? "YOUR KEY" : "none"}")
stream = client.chat.completions.create(
    model=${JSON.stringify(model ?? "")},
    messages=${literal(messages)},
    temperature=${temperature},
    max_tokens=${tokens},${seed === "" ? "" : `\n    seed=${seed},`}
    stream=True,
    extra_body=${literal(extra)},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function grpcurl(body, seed, port) {
  const sampling = { temperature: body.temperature };
  const request = {
    chat: { messages: body.messages },
    sampling,
    stopping: { max_tokens: body.max_tokens },
    return_drafts: true,
    ...(body.speculation ? { max_draft_tokens: 0 } : {}),
  };
  const text = JSON.stringify({ ...request, sampling: seed === "" ? sampling : { ...sampling, seed } }, null, 2);
  const key = hasKey() ? ` \\\n  -H "authorization: Bearer $PILOTFISH_API_KEY"` : "";
  return `grpcurl -plaintext${key} -d ${quoted(text)} \\\n  ${location.hostname}:${port} pilotfish.v1.GenerationService/Generate`;
}
