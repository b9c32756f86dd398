"""The wheel of `pilotfish-client` in an environment of its own: no torch, no Ray, both clients."""

from __future__ import annotations

import asyncio
from importlib.metadata import distributions

from pilotfish_client import AsyncClient, Client, InvalidRequest, Message, Parameters, Started

from checks import arguments, check, require, run

_, ADDRESS, MODEL = arguments()
QUESTION = [Message("user", "Name three rivers.")]
SMALL = Parameters(max_tokens=24, temperature=0.7, seed=3)


@check("what is installed")
def installed() -> str:
    names = sorted({found.metadata["Name"].lower() for found in distributions()})
    require(not {"torch", "ray", "numpy", "transformers"} & set(names), names)
    return ", ".join(names)


@check("generate, sync and async: the same text")
def generate() -> str:
    with Client(ADDRESS) as client:
        one = client.generate(QUESTION, SMALL)

    async def ask() -> str:
        async with AsyncClient(ADDRESS) as client:
            return (await client.generate(QUESTION, SMALL)).text

    require(one.text and one.text == asyncio.run(ask()), one)
    return f"{one.text[:40]!r}, {one.choices[0].usage.accepted_draft_tokens} drafted tokens accepted"


@check("stream, tokenize, detokenize, models, errors")
def others() -> str:
    with Client(ADDRESS) as client:
        started, *rest = client.stream("Once upon a time", SMALL)
        require(isinstance(started, Started) and started.seed == 3, started)
        require(client.detokenize(client.tokenize("Hello there", False)) == "Hello there", "another text")
        require(client.models()[0] == MODEL, client.models())
        try:
            client.generate("hi", Parameters(temperature=-1.0))
        except InvalidRequest as error:
            return f"{len(rest)} events, {error.field} refused"
    raise ValueError("no error")


if __name__ == "__main__":
    run("pilotfish-client")
