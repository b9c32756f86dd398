"""LangChain's `ChatOpenAI`: invoke, stream, batch, tools, structured output."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from checks import TOOL_QUESTION, TOOLS, arguments, check, require, run

URL, _, MODEL = arguments()
CHAT = ChatOpenAI(
    model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=48, temperature=0.0, max_retries=0, timeout=300.0
)


@check("invoke")
def invoke() -> str:
    answer = CHAT.invoke([SystemMessage("You are brief."), HumanMessage("Name three rivers.")])
    require(answer.content and answer.usage_metadata["output_tokens"] > 0, answer)
    return repr(answer.content[:40])


@check("stream: the same text")
def stream() -> str:
    whole = CHAT.invoke("Name three rivers.").content
    parts = [chunk.content for chunk in CHAT.stream("Name three rivers.")]
    require("".join(parts) == whole, parts)
    return f"{len(parts)} chunks"


@check("batch and a chain")
def batch() -> str:
    chain = ChatPromptTemplate.from_template("Name three {things}.") | CHAT
    answers = chain.batch([{"things": "rivers"}, {"things": "cities"}])
    require(len(answers) == 2 and all(answer.content for answer in answers), answers)
    return f"{len(answers)} answers"


@check("bind_tools")
def tools() -> str:
    answer = CHAT.bind(max_tokens=64).bind_tools(TOOLS).invoke(TOOL_QUESTION)
    require(answer.content or answer.tool_calls, answer)
    return f"{len(answer.tool_calls)} calls"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@check("with_structured_output")
def structured() -> str:
    found = CHAT.with_structured_output(Person, method="json_schema").invoke("Anna is 31 years old. Give JSON.")
    require(isinstance(found, Person), found)
    return repr(found)


@check("completions (OpenAI)")
def completions() -> str:
    text = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=8, temperature=0.0).invoke("One, two,")
    require(text, text)
    return repr(text)


if __name__ == "__main__":
    run("langchain-openai", "langchain-core")
