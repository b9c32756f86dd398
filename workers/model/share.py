"""The part of a model that one tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each layer's heads and feed-forward columns that one tensor-parallel rank holds."""

    rank: int
    ranks: int
    expert_parallel: bool = False
    """Whether each rank holds whole experts of a mixture, and not a part of each."""

    def of(self, count: int, what: str) -> slice:
        """The rank's part of `count` equal parts. Raises `ConfigurationError` if the ranks do not divide them."""
        if count % self.ranks:
            raise ConfigurationError(f"target.tensor_parallel: {self.ranks} does not divide {what} = {count}")
        size = count // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    def tokens(self, count: int) -> slice:
        """The rank's part of the vocabulary, or of columns; the last part may be shorter."""
        size = -(-count // self.ranks)
        return slice(min(count, self.rank * size), min(count, (self.rank + 1) * size))

    def blocks(self, count: int, size: int, what: str) -> slice:
        """The rank's part of `count` numbers in whole blocks of `size`; some ranks may have one block more.

        Raises `ConfigurationError` if there are fewer blocks than ranks.
        """
        found = count // size
        if found < self.ranks:
            raise ConfigurationError(
                f"target.tensor_parallel: {self.ranks} is refused: {what} = {count} are {found} blocks of {size}; it "
                f"must be at most {found}"
            )
        first, last = (rank * found // self.ranks * size for rank in (self.rank, self.rank + 1))
        return slice(first, last)

    def experts(self, count: int) -> slice:
        """The rank's experts of `count`. Raises `ConfigurationError` if the ranks do not divide them evenly."""
        if count % self.ranks:
            raise ConfigurationError(
                f"target.enable_expert_parallel: refused, because target.tensor_parallel = {self.ranks} does not "
                f"divide {count} experts; it must be false"
            )
        return self.of(count, "the experts")

    def query_heads(self, count: int, kv_heads: int) -> slice:
        """The rank's part of `count` query heads.

        Ranks that share a KV head divide the query heads that read it. Where they do not divide them evenly, some of
        these ranks have one more. Raises `ConfigurationError` if that leaves a rank without any.
        """
        sharing, group = self.ranks // kv_heads, count // kv_heads
        if self.ranks % kv_heads or sharing > group:
            return self.of(count, "num_attention_heads")
        head, place = divmod(self.rank, sharing)
        first, last = (head * group + one * group // sharing for one in (place, place + 1))
        return slice(first, last)

    def kv_heads(self, count: int) -> slice:
        """The KV heads of this rank's query heads. Where there are more ranks than KV heads, several hold the same."""
        if count % self.ranks == 0:
            return self.of(count, "num_key_value_heads")
        first = self.rank * count // self.ranks
        return slice(first, first + 1)
