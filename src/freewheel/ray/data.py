"""A dataset of Ray's as samples that are dealt: rows of blocks that lie in Ray's object store.

`streaming_split` deals blocks by rank: a slow worker delays the others, and a lost one's rows are lost. Here
all workers know all blocks, and rows are leased as the samples of any dataset are (data/dealing.py), block
after block: a worker uses one or two of them, and fetches the next while it trains.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.data.block import BlockAccessor
from ray.data.dataset import MaterializedDataset

from freewheel.errors import ConfigError


class Rows:
    """The rows of a materialized dataset; a batch is a dict of tensors, as of `iter_torch_batches`."""

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        if not isinstance(dataset, MaterializedDataset):
            raise ConfigError(
                "a Ray dataset that is read as it goes would be read by every worker. Give "
                "worker.loader(dataset.materialize()), made once, before the workers begin."
            )
        for name in ("num_workers", "sampler", "batch_sampler"):
            if options.pop(name, None):
                raise ConfigError(f"a Ray dataset is read by Ray, in its own order, and takes no {name}.")
        self.collate: Callable[[dict[str, Any]], Any] = options.pop("collate_fn", None) or tensors
        options["collate_fn"] = lambda batch: batch  # `__getitems__` has made all of it
        self.refs: list[Any] = []
        self.lengths: list[int] = []
        for bundle in dataset.iter_internal_ref_bundles():
            for ref, about in zip(bundle.block_refs, bundle.metadata, strict=True):
                if about.num_rows:
                    self.refs.append(ref)
                    self.lengths.append(about.num_rows)
        self.starts = [0, *itertools.accumulate(self.lengths)]
        self.ahead: Callable[[], list[int]] = list  # which rows are wanted next
        self._fetch = functools.lru_cache(3)(lambda block: ray.get(self.refs[block]))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        parts = [self._take(block, list(some)) for block, some in itertools.groupby(rows, self._block_of)]
        for row in self.ahead()[-1:]:  # let Ray bring the next block here, beside training
            ray.wait([self.refs[self._block_of(row)]], timeout=0, fetch_local=True)
        return self.collate({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _block_of(self, row: int) -> int:
        return bisect.bisect_right(self.starts, row) - 1

    def _take(self, block: int, rows: list[int]) -> dict[str, Any]:
        taken = BlockAccessor.for_block(self._fetch(block)).take([row - self.starts[block] for row in rows])
        return dict(BlockAccessor.for_block(taken).to_batch_format("numpy"))


def tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """Columns of numbers as tensors; others as they are."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(column)) if column.dtype.kind in "biufc" else column
        for name, column in batch.items()
    }
