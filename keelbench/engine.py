"""The step engine: forward, backward, clip and update of all lanes, and nothing else.

No step waits for the device: losses and gradient norms go into a preallocated buffer that
the host reads between chunks of steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelbench.archs import make_rule
from keelbench.data import TokenSource, open_source
from keelbench.model import LaneModel
from keelbench.optim import LaneOptimizer
from keelbench.specs import CellSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class Engine:
    """Trains the lanes of one cell.

    Args:
        cell: a validated, resolved cell.
        seeds: one per lane: weights and data order.
        capacity: the largest number of steps that will ever be asked for.
        is_fused: see ``LaneModel``; None takes the fast path, False the oracle.
    """

    def __init__(
        self,
        cell: CellSpec,
        seeds: Sequence[int],
        capacity: int,
        *,
        source: TokenSource | None = None,
        is_fused: bool | None = None,
    ) -> None:
        self.cell = cell
        self.seeds = list(seeds)
        self.source = source or open_source(cell.data)
        compute_dtype = TORCH_DTYPES[cell.dtype]
        self.model = LaneModel(
            cell.model,
            make_rule(cell.model.arch),
            self.source.vocab,
            seeds,
            device=cell.device,
            dtype=torch.float64 if cell.dtype == "float64" else torch.float32,
            compute_dtype=compute_dtype,
            is_fused=is_fused,
        )
        self.optimizer = LaneOptimizer(self.model, cell.optim)
        self.steps = 0
        device, dtype = self.model.device, self.model.flat_SP.dtype
        self._log_2TS = torch.zeros(2, capacity, len(self.seeds), device=device, dtype=dtype)
        probe = self.source.probe(cell.data.probe_batch, cell.data.seq)
        self.unigram_entropy = self.source.unigram_loss(probe)
        self._probe_BT = torch.from_numpy(probe).to(device)
        self._probe_steps: list[int] = []
        self._probe_rows: list[Tensor] = []

    @property
    def lanes(self) -> int:
        return len(self.seeds)

    def advance(self, lrs_TS: NDArray[np.float64]) -> None:
        """Train one step per row of learning rates, (steps, lanes)."""
        for lrs in lrs_TS:
            if self.steps % self.cell.data.probe_every == 0:
                self._probe()
            self._step(lrs)

    def _step(self, lrs: NDArray[np.float64]) -> None:
        loss_S = self.model.train_losses(self._batch())
        self.optimizer.set_lrs((lrs * self.cell.ramp.lr_multiplier).tolist())
        self._log_2TS[0, self.steps] = loss_S
        self._log_2TS[1, self.steps] = self.optimizer.step()
        self.steps += 1

    def _batch(self) -> Tensor:
        data = self.cell.data
        windows = [
            self.source.batch(seed, self.steps, data.batch, data.seq) for seed in self.seeds
        ]
        return torch.from_numpy(np.stack(windows)).to(self.model.device, non_blocking=True)

    def _probe(self) -> None:
        with torch.no_grad():
            windows = self._probe_BT.expand(self.lanes, *self._probe_BT.shape)
            self._probe_rows.append(self.model.losses(windows))
        self._probe_steps.append(self.steps)

    def losses(self) -> NDArray[np.float64]:
        """Train losses so far, (steps, lanes); waits for the device."""
        return self._log_2TS[0, : self.steps].double().cpu().numpy()

    def grad_norms(self) -> NDArray[np.float64]:
        """Global gradient norms before clipping so far, (steps, lanes)."""
        return self._log_2TS[1, : self.steps].double().cpu().numpy()

    def probes(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps (probes,) and losses (probes, lanes) of the probe so far."""
        losses = torch.stack(self._probe_rows).double().cpu().numpy()
        return np.asarray(self._probe_steps, dtype=np.int64), losses

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only: the others cost nothing from here on."""
        lanes = list(lanes)
        self.seeds = [self.seeds[lane] for lane in lanes]
        self.model.keep(lanes)
        self.optimizer.keep(lanes)
        self._log_2TS = self._log_2TS[:, :, lanes].contiguous()
        self._probe_rows = [row[lanes] for row in self._probe_rows]
