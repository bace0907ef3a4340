"""Bring your own model: any module from tokens (B, T) to logits (B, T, V), one per lane.

``ForeignEngine`` trains such modules as ``Engine`` trains lanes, so ramp, detector, records
and gate are the same. What the user holds is left as it was found: every lane is a deep copy,
and neither torch's, numpy's nor Python's global random state moves.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelbench.data import TokenSource, open_source
from keelbench.engine import TORCH_DTYPES, Engine
from keelbench.foreign_model import ForeignModel
from keelbench.optim import LaneOptimizer
from keelbench.registry import load_object
from keelbench.specs import CellSpec

FloatArray = NDArray[np.float64]


def open_engine(
    cell: CellSpec,
    seeds: Sequence[int],
    capacity: int,
    *,
    source: TokenSource | None = None,
) -> Engine:
    """The engine of a cell: its own lanes, or the user's modules if ``model.module`` is set.

    A ``ForeignEngine`` is no subclass, but has the interface that ramps and searches use.
    """
    if cell.model.module is None:
        return Engine(cell, seeds, capacity, source=source)
    return cast(Engine, ForeignEngine(cell, seeds, capacity, source=source))


class ForeignEngine:
    """Trains the user's modules; see ``Engine``, whose interface it has.

    Args:
        cell: a validated cell; ``model.module`` names the factory unless ``build`` is given.
        seeds: one per lane: weights and data order.
        capacity: as in ``Engine``; not needed here.
        build: the factory, or a module that every lane gets a copy of.
    """

    def __init__(
        self,
        cell: CellSpec,
        seeds: Sequence[int],
        capacity: int,
        *,
        source: TokenSource | None = None,
        build: Callable[..., nn.Module] | nn.Module | None = None,
    ) -> None:
        self.cell = cell
        self.seeds = list(seeds)
        self.source = source or open_source(cell.data)
        self.model = ForeignModel(
            cell.model,
            build or load_object(cell.model.module or ""),
            self.source.vocab,
            cell.data.seq,
            seeds,
            device=cell.device,
            dtype=torch.float64 if cell.dtype == "float64" else None,
            is_autocast=TORCH_DTYPES[cell.dtype] == torch.bfloat16,
        )
        self.optimizer = LaneOptimizer(self.model, cell.optim)  # type: ignore[arg-type]
        probe = self.source.probe(cell.data.probe_batch, cell.data.seq)
        self.unigram_entropy = self.source.unigram_loss(probe)
        self._probe_BT = torch.from_numpy(probe).to(self.model.device)
        self._probe_steps: list[int] = []
        self._probe_rows: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    @property
    def lanes(self) -> int:
        return len(self.seeds)

    @property
    def steps(self) -> int:
        return len(self._losses)

    def advance(self, lrs_TS: FloatArray) -> None:
        """Train one step per row of learning rates, (steps, lanes)."""
        for lrs in lrs_TS:
            if self.steps % self.cell.data.probe_every == 0:
                windows = self._probe_BT.expand(self.lanes, *self._probe_BT.shape)
                self._probe_rows.append(self.model.losses(windows))
                self._probe_steps.append(self.steps)
            data = self.cell.data
            windows = torch.from_numpy(
                np.stack(
                    [self.source.batch(s, self.steps, data.batch, data.seq) for s in self.seeds]
                )
            ).to(self.model.device)
            loss_S = self.model.train_losses(windows)
            self.optimizer.set_lrs((lrs * self.cell.ramp.lr_multiplier).tolist())
            self._norms.append(self.optimizer.step())
            self._losses.append(loss_S)

    def losses(self) -> FloatArray:
        """Train losses so far, (steps, lanes)."""
        return _stacked(self._losses, self.lanes)

    def grad_norms(self) -> FloatArray:
        """Global gradient norms before clipping so far, (steps, lanes)."""
        return _stacked(self._norms, self.lanes)

    def probes(self) -> tuple[NDArray[np.int64], FloatArray]:
        """Steps (probes,) and losses (probes, lanes) of the probe so far."""
        return np.asarray(self._probe_steps, dtype=np.int64), _stacked(
            self._probe_rows, self.lanes
        )

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only: the others cost nothing from here on."""
        lanes = list(lanes)
        self.seeds = [self.seeds[lane] for lane in lanes]
        self.model.keep(lanes)
        self.optimizer.keep(lanes)
        for rows in (self._losses, self._norms, self._probe_rows):
            rows[:] = [row[lanes] for row in rows]


def _stacked(rows: list[Tensor], lanes: int) -> FloatArray:
    if not rows:
        return np.empty((0, lanes))
    stacked: FloatArray = torch.stack(rows).double().cpu().numpy()
    return stacked
