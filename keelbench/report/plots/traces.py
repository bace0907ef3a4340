"""What of a trace is drawn: loss and gradient norm, with no more points than can be seen."""

import math

import numpy as np

from keelbench.records import FloatArray, Trace

SHOWN_RANGE = 150
"""Factor of LR that a figure shows: the first few steps of a ramp take up half of a log axis
and show nothing but the loss at the start."""

BINS = 400
"""A loss curve keeps its extremes in each of so many bins of log LR, which no eye can tell
from all of its points."""

NORM_BINS = 90
"""A gradient norm, which is noisier, is shown by its median and range in each of so many bins
of the shown range."""


def loss_of(trace: Trace, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The probe loss where there is one, else the train loss."""
    if trace.probe is None or trace.probe_step is None or not len(trace.probe):
        return x, trace.loss
    return x[trace.probe_step], trace.probe


def grad_norm_of(trace: Trace, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The median in each bin of log LR."""
    x, bins = binned_norms(trace, x)
    return x, np.array([float(np.median(values)) for values in bins])


def binned_norms(trace: Trace, x: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
    """Finite norms by bin of log LR: the bins' centres, and the norms in each."""
    if trace.grad_norm is None:
        return x[:0], []
    usable = np.isfinite(trace.grad_norm) & (trace.grad_norm > 0) & (x > 0)
    x, y = x[usable], trace.grad_norm[usable]
    if not len(x):
        return x, []
    width = math.log(SHOWN_RANGE) / NORM_BINS
    edges = np.flatnonzero(np.diff(np.floor(np.log(x) / width))) + 1
    centers = [float(np.exp(np.log(part).mean())) for part in np.split(x, edges)]
    return np.array(centers), np.split(y, edges)


def thinned(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same picture with fewer points: the extremes of each bin of log LR."""
    positive = x > 0
    x, y = x[positive], y[positive]
    if len(x) <= 2 * BINS:
        return x, y
    place = np.log(x / x[0]) / np.log(x[-1] / x[0]) * BINS
    kept: set[int] = {0, len(x) - 1}
    edges = np.flatnonzero(np.diff(place.astype(int))) + 1
    for part in np.split(np.arange(len(x)), edges):
        finite = part[np.isfinite(y[part])]
        members = finite if len(finite) else part
        kept |= {int(members[y[members].argmin()]), int(members[y[members].argmax()])}
    order = sorted(kept)
    return x[order], y[order]
