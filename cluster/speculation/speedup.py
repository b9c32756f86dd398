"""What rounds brought, with guesses and without, by the rows that decided in them.

The controller predicts; this is what came of it. Where rounds with guesses were slower than those without, guessing is
held back, whatever is predicted, and tried again after a pause that doubles each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.speculation.latency import bucket_of

LEAST_PLAIN = 1
"""Rounds without guesses that must be known before any has one."""
FIRST_PAUSE = 64
"""Rounds for which guessing is held back the first time."""
LONGEST_PAUSE = 2048
_KEEP = 1 - 1 / 32
_SURELY, _SURELY_ALONE, _SURE_ROUNDS = 1.05, 0.97, 16
"""Less than this many times as fast as plain decoding, over so many rounds, does not pay: what a drafter takes beside
them, above all to learn prompts, is to be had of it, too. With one sequence that is little."""
_CLEARLY, _CLEAR_ROUNDS = 0.9, 6


@dataclass(slots=True)
class _Account:
    """Of rounds of about as many rows. Sums fade."""

    plain_seconds: float = 0.0
    plain_rounds: float = 0.0
    seconds: float = 0.0
    """With guesses, as are the next two."""
    tokens: float = 0.0
    rows: float = 0.0
    rounds: int = 0
    """With guesses, since guessing was last held back."""
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    @property
    def advantage(self) -> float:
        """How many times as fast as rounds without guesses those with guesses were."""
        per_row = self.plain_seconds / self.plain_rounds  # rounds of one account have about as many rows
        plain_seconds = per_row * self.rounds_faded
        return (self.tokens / self.rows) * plain_seconds / self.seconds

    @property
    def rounds_faded(self) -> float:
        """Rounds with guesses, as the sums count them."""
        return (1 - _KEEP**self.rounds) / (1 - _KEEP)


class Ledger:
    """One per judge."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def holds_back(self, rows: int) -> bool:
        """Whether a round of so many rows is to have no guesses. Asked once per round."""
        account = self._account(rows)
        if account.plain_rounds < LEAST_PLAIN:
            return True
        # The more rows there are, the dearer is each guess: what does not pay for few does not pay for more.
        paused = [other for bucket, other in self._accounts.items() if bucket <= bucket_of(rows) and other.pause]
        for other in paused:
            other.pause -= 1
        return bool(paused)

    def pays(self, rows: int) -> bool:
        """Whether rounds with guesses were faster than those without, of late."""
        account = self._account(rows)
        is_known = account.plain_rounds >= LEAST_PLAIN and account.rounds >= _CLEAR_ROUNDS
        return is_known and account.advantage > 1.0

    def plain(self, rows: int, seconds: float) -> None:
        """A round without guesses, nor prompts, took so long."""
        account = self._account(rows)
        account.plain_seconds = account.plain_seconds * _KEEP + seconds
        account.plain_rounds = account.plain_rounds * _KEEP + 1

    def guessed(self, rows: int, seconds: float, tokens: int) -> None:
        """A round with guesses and without prompts took so long, waiting included, and committed so many tokens."""
        account = self._account(rows)
        account.seconds = account.seconds * _KEEP + seconds
        account.tokens = account.tokens * _KEEP + tokens
        account.rows = account.rows * _KEEP + rows
        account.rounds += 1
        if account.plain_rounds < LEAST_PLAIN:
            return
        advantage = account.advantage
        if (account.rounds >= _SURE_ROUNDS and advantage < (_SURELY if rows > 1 else _SURELY_ALONE)) or (
            account.rounds >= _CLEAR_ROUNDS and advantage < _CLEARLY
        ):
            account.pause, account.next_pause = account.next_pause, min(2 * account.next_pause, LONGEST_PAUSE)
            account.seconds = account.tokens = account.rows = 0.0
            account.rounds = 0
        elif account.rounds >= _SURE_ROUNDS:
            account.next_pause = FIRST_PAUSE

    def _account(self, rows: int) -> _Account:
        return self._accounts.setdefault(bucket_of(rows), _Account())
