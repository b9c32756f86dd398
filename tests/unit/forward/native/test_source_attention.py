"""The CPU kernel attends to the source of an encoder-decoder model."""

from __future__ import annotations

import shutil
from array import array

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.core.kv import KvLayout
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.native import NativeBackend
from workers.forward.native.attention import NativeStep, StepHeader, address
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler on this machine"
)


@pytest.mark.parametrize("on_tiles", [False, True], ids=["vectors", "tiles"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("length", [17, 70, 100, 128])
def test_a_source_is_read_from_its_own_blocks_alone(
    length: int, tokens: int, on_tiles: bool, code: str, emulated: str
) -> None:
    """All tokens see a whole source, whose committed length is no bound. What follows its blocks is never read."""
    dtype = torch.bfloat16 if on_tiles else torch.float32
    generator = torch.Generator().manual_seed(length)
    keys, values = torch.randn(2, 9, 16, 2, 64, generator=generator).to(dtype)
    poisoned = 8
    keys[poisoned] = values[poisoned] = float("nan")
    used = -(-length // 16)
    held = [3, 0, 5, 1, 6, 2, 4, 7][:used]
    blocks, nothing = array("i", [*held, *[poisoned] * 8]), array("q", [0])
    first, ends, position = array("i", [0, tokens]), array("i", [2**31 - 1]), array("i", [length - 1] * tokens)
    arrays = (blocks, nothing, first, ends, ends, position, nothing)
    step = NativeStep(StepHeader(1, 0, 16, used, 0, *map(address, arrays)), arrays, length)
    query = torch.randn(1, 4, tokens, 64, generator=generator).to(dtype)
    groups = KvCacheGroups(KvLayout(16), (LayerPlacement(0, 0, AttentionWindow()),), (LayerShape(2, 64),))
    store, layers = KvStore(groups, [keys], [values]), (LayerShape(2, 64, heads_per_kv=2),)
    directory = emulated if on_tiles else code
    backend = NativeBackend(AttentionSetting(store, layers, 8, dtype, torch.device("cpu"), code_directory=directory))
    found = backend.attend(0, query[0].transpose(0, 1), step, 0.125)
    seen, read = (part[held].flatten(0, 1)[:length].transpose(0, 1).float() for part in (keys, values))
    seen, read = (part.repeat_interleave(2, dim=0) for part in (seen, read))
    expected = scaled_dot_product_attention(query[0].float(), seen, read, scale=0.125).transpose(0, 1)
    torch.testing.assert_close(
        found.float(), expected, rtol=2.0**-8 if on_tiles else 0.0, atol=2.0**-6 if on_tiles else 1e-5
    )
