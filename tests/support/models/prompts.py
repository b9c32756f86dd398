"""Prompts of several kinds: chat and plain, prose and code, ASCII and not, short and long."""

from __future__ import annotations

CHAT = (
    "What is the capital of France, and which river runs through it?",
    "Write a haiku about a fish that swims ahead of a shark.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left? Think step by step.",
    "Translate into German: The weather is beautiful today and we are going to the lake.",
    "Correct the spelling and write it out again: Yesturday I whent to the libary and red three boks abaut wales.",
    "Summarize in one sentence: The committee met on Tuesday. It discussed the budget, which had grown by four "
    "percent, and decided to postpone the vote until the missing figures had arrived.",
    "Explain in simple words why the sky is blue.",
    "List five European countries with their capitals.",
    "You are a pirate. Greet me and ask for my name.",
    "Extract all dates as a list: The fair opened on May 3, 1911, closed on June 9, 1911 and reopened on July 1, 1912.",
)
"""Rendered by the model's chat template."""

PLAIN = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n        print(name)\n\n\ndef",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Q: What is 7 + 5?\nA: 12\nQ: What is 9 + 4?\nA: 13\nQ: What is 6 + 8?\nA:",
    "Il était une fois, dans un petit village près de la mer,",
    "吾輩は猫である。名前は",
    "😀😃😄 😀😃😄 😀😃",
    "a",
    '{"name": "Ada", "born": 1815, "field": "mathematics"}\n{"name": "Alan", "born": 1912, "field":',
    "   \n\n\tIndentation first, then",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer " * 8,
)
"""Continued without the chat template."""
