"""The step engine: forward, backward, clip and update of all lanes, and nothing else.

No step waits for the device: losses and gradient norms go into a preallocated buffer that
the host reads between chunks of steps. On a GPU a whole step is one graph (``cuda_graph``).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelbench.archs import make_rule
from keelbench.cuda_graph import GraphedCall
from keelbench.data import TokenSource, open_source
from keelbench.memory import should_checkpoint
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
        is_cuda = cell.device == "cuda"
        self.model = LaneModel(
            cell.model,
            make_rule(cell.model.arch),
            self.source.vocab,
            seeds,
            device=cell.device,
            dtype=torch.float64 if cell.dtype == "float64" else torch.float32,
            compute_dtype=compute_dtype,
            is_fused=is_fused,
            is_checkpointed=is_cuda and self._is_tight(),
        )
        self.optimizer = LaneOptimizer(self.model, cell.optim, capturable=is_cuda)
        self.steps = 0
        device, dtype = self.model.device, self.model.flat_SP.dtype
        self._log_2TS = torch.zeros(2, capacity, len(self.seeds), device=device, dtype=dtype)
        probe = self.source.probe(cell.data.probe_batch, cell.data.seq)
        self.unigram_entropy = self.source.unigram_loss(probe)
        self._probe_BT = torch.from_numpy(probe).to(device)
        self._probe_steps: list[int] = []
        self._probe_rows: list[Tensor] = []
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._probe_loss_S = torch.zeros(self.lanes, device=device, dtype=dtype)
        calls: list[Callable[[Tensor], None]] = [self._train, self._measure]
        self._graphs = [GraphedCall(call) for call in calls] if is_cuda else []
        run: list[Callable[[Tensor], None]] = [*(self._graphs or calls)]
        self._run_train, self._run_measure = run

    def _is_tight(self) -> bool:
        """Whether a step fits into the GPU's free memory only with checkpointing."""
        free, _ = torch.cuda.mem_get_info()
        return should_checkpoint(self.cell, self.source.vocab, self.lanes, free)

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
        self.optimizer.set_lrs((lrs * self.cell.ramp.lr_multiplier).tolist())
        self._run_train(self._batch())
        self.steps += 1

    def _train(self, windows_SBT: Tensor) -> None:
        """A whole step on the device; the step's index lives there too."""
        loss_S = self.model.train_losses(windows_SBT)
        norm_S = self.optimizer.step()
        self._log_2TS.index_copy_(1, self._at, torch.stack((loss_S, norm_S))[:, None])
        self._at.add_(1)

    def _batch(self) -> Tensor:
        data = self.cell.data
        windows = [
            self.source.batch(seed, self.steps, data.batch, data.seq) for seed in self.seeds
        ]
        return torch.from_numpy(np.stack(windows)).to(self.model.device, non_blocking=True)

    def _probe(self) -> None:
        self._run_measure(self._probe_BT.expand(self.lanes, *self._probe_BT.shape))
        self._probe_rows.append(self._probe_loss_S.clone())
        self._probe_steps.append(self.steps)

    @torch.no_grad()
    def _measure(self, windows_SBT: Tensor) -> None:
        self._probe_loss_S.copy_(self.model.losses(windows_SBT))

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
        self._probe_loss_S = self._probe_loss_S[lanes]
        for graph in self._graphs:
            graph.reset()

    @property
    def notes(self) -> list[str]:
        """What a reader of the results should know about how the steps ran."""
        return sorted({graph.problem for graph in self._graphs if graph.problem})
