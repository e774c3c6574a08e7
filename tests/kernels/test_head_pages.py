"""Large pages are a hint: values are the same with and without, and it is left out where it could cost time."""

from unittest import mock

import pytest
import torch

from fastrl.kernels import pages

TABLE = """Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal    100     50      0      0      0      0      0      0      9      2      4
"""


def test_free_blocks_are_counted_in_large_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FREE_BLOCKS", tmp_path / "buddyinfo")
    assert pages.free_large_pages() == 0  # the kernel does not say
    pages.FREE_BLOCKS.write_text(TABLE)
    assert pages.free_large_pages() == (1 + 2 * 3) + (2 + 2 * 4)


@pytest.mark.parametrize(("elements", "free", "asked"), [(1 << 20, 4, True), (1 << 20, 3, False), (1 << 10, 99, False)])
def test_only_large_buffers_with_pages_at_hand(elements, free, asked, monkeypatch):
    call = mock.Mock(return_value=0)
    monkeypatch.setattr(pages, "_madvise", lambda: call)
    monkeypatch.setattr(pages, "free_large_pages", lambda: free)
    x = torch.empty(elements)
    assert pages.large_pages(x) is x
    assert call.called == asked
    if asked:
        start, size, _ = call.call_args.args
        assert start % 4096 == 0 and x.data_ptr() <= start and start + size == x.data_ptr() + 4 * elements
