"""What is asked: defaults, validation, overrides, and a hash of all that counts."""

import dataclasses
import json
from typing import Any

import pytest
from helpers import refusal

from keelbench.specs import (
    FIELD_NAMES,
    CellSpec,
    DataSpec,
    ModelSpec,
    OptimSpec,
    RampSpec,
    content_hash,
    find_field,
)


def cell(**settings: Any) -> CellSpec:
    return CellSpec().replaced(settings)


# Defaults


@pytest.mark.parametrize("width", [16, 64, 1024])
def test_defaults_equal_the_papers_at_its_width_and_scale_from_there(width: int) -> None:
    spec = CellSpec(model=ModelSpec(width=width)).resolved()
    assert spec.model.init_std == pytest.approx(0.02 * (1024 / width) ** 0.5)
    assert spec.model.embed_std == 0.02
    assert spec.model.hidden == 3 * width
    assert spec.ramp.slope == pytest.approx(1e-5 * 1024 / width)
    assert spec.ramp.peak == pytest.approx(5e-2 * 1024 / width)
    assert spec.ramp.steps == 5000


@pytest.mark.parametrize(
    ("width", "heads"), [(16, (2, 1)), (64, (4, 2)), (256, (16, 8)), (1024, (16, 8))]
)
def test_half_as_many_kv_heads_as_heads(width: int, heads: tuple[int, int]) -> None:
    model = ModelSpec(width=width).resolved()
    assert (model.heads, model.kv_heads) == heads


def test_what_is_given_is_kept() -> None:
    model = ModelSpec(width=32, heads=8, kv_heads=8, hidden=40, init_std=0.1).resolved()
    assert (model.heads, model.kv_heads, model.hidden, model.init_std) == (8, 8, 40, 0.1)
    ramp = RampSpec(slope=1e-4, peak=2e-3).resolved(width=32)
    assert (ramp.slope, ramp.peak, ramp.steps) == (1e-4, 2e-3, 20)


def test_depth_counts_sub_layers() -> None:
    assert ModelSpec(depth=64).blocks == 32


# Validation


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 7}, "model.depth is 7: it counts sub-layers"),
        ({"depth": 0}, "must be even and at least 2"),
        ({"width": 2}, "model.width is 2: it must be at least 4"),
        ({"heads": 3}, "model.width 64 is not divisible by model.heads 3"),
        ({"heads": 0}, "model.heads 0"),
        ({"heads": -2}, "model.heads -2"),
        ({"heads": 64}, "is odd: RoPE rotates pairs"),
        ({"kv_heads": 3}, "model.heads 4 is not divisible by model.kv_heads 3"),
        ({"kv_heads": 0}, "model.kv_heads 0"),
        ({"hidden": 0}, "model.hidden is 0: it must be at least 1"),
        ({"hidden": -1}, "model.hidden is -1"),
        ({"norm": "rmsnrom"}, "did you mean 'rmsnorm'?"),
        ({"norm": "batch"}, "allowed are rmsnorm, layernorm, dyt"),
        ({"init_std": 0}, "model.init_std is 0.0: it must be a positive number"),
        ({"init_std": "nan"}, "model.init_std is nan"),
        ({"embed_std": "inf"}, "model.embed_std is inf"),
        ({"batch": 0}, "data.batch is 0: it must be at least 1"),
        ({"seq": 1}, "data.seq is 1: it must be at least 2"),
        ({"probe_batch": 0}, "data.probe_batch is 0"),
        ({"probe_every": 0}, "data.probe_every is 0"),
        ({"beta1": 1}, "optim.beta1 is 1.0: it must lie in [0, 1)"),
        ({"beta2": "nan"}, "optim.beta2 is nan"),
        ({"eps": -1}, "optim.eps is -1.0"),
        ({"weight_decay": "inf"}, "optim.weight_decay is inf"),
        ({"clip": -1}, "optim.clip is -1.0: it must be >= 0"),
        ({"lr_scaling": "mups"}, "optim.lr_scaling is 'mups': allowed are none, mup"),
        ({"slope": 0}, "ramp.slope is 0.0: it must be a positive LR"),
        ({"peak": "inf"}, "ramp.peak is inf"),
        ({"slope": 1, "peak": 0.5}, "ramp.peak 0.5 lies below the first step's LR 1"),
        ({"protocol": "ramps"}, "did you mean 'ramp'?"),
        ({"hold_steps": 3}, "ramp.hold_steps is 3"),
        ({"hold_resolution": 0.9}, "ramp.hold_resolution is 0.9"),
        ({"lr_multiplier": -1}, "ramp.lr_multiplier is -1.0"),
        ({"device": "tpu"}, "device is 'tpu': allowed are cpu, cuda"),
        ({"dtype": "float16"}, "dtype is 'float16': allowed are float32, bfloat16, float64"),
        ({"threads": 0}, "threads is 0: it must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    message = refusal(lambda: cell(**settings).validated())
    assert said in message, message
    assert "problems" not in message, "one mistake, one sentence"


def test_all_problems_are_listed_at_once() -> None:
    broken = cell(depth=7, batch=0, beta1=2, slope=-1, device="tpu")
    message = refusal(broken.validated)
    assert message.startswith("5 problems:")
    for name in ("model.depth", "data.batch", "optim.beta1", "ramp.slope", "device"):
        assert f"- {name} is" in message


def test_a_default_cell_is_valid_and_resolving_is_idempotent() -> None:
    resolved = CellSpec().validated()
    assert resolved.problems() == []
    assert resolved.resolved() == resolved


# Plain values in and out


def test_plain_values_survive_json() -> None:
    spec = cell(arch="mix_ln(post_fraction=0.5)", slope=3e-4, qk_norm=True, vocab=99)
    assert CellSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_text_is_read_as_the_number_it_spells() -> None:
    """YAML 1.1 reads 1e-5 as text, and shells know nothing but text."""
    spec = cell(slope="1e-5", depth="32", batch=4.0, qk_norm="true", heads=None)
    assert (spec.ramp.slope, spec.model.depth, spec.data.batch) == (1e-5, 32, 4)
    assert spec.model.qk_norm is True
    assert isinstance(spec.data.batch, int)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 6.5}, "model.depth is 6.5: it must be a whole number"),
        ({"depth": "deep"}, "model.depth is 'deep': it must be a whole number"),
        ({"depth": True}, "model.depth is True: it must be a whole number"),
        ({"depth": None}, "model.depth is None: it must be a whole number"),
        ({"depth": "inf"}, "model.depth is 'inf'"),
        ({"slope": "steep"}, "ramp.slope is 'steep': it must be a number"),
        ({"slope": [1]}, "ramp.slope is [1]: it must be a number"),
        ({"slope": False}, "ramp.slope is False: it must be a number"),
        ({"qk_norm": "maybe"}, "model.qk_norm is 'maybe': it must be true or false"),
        ({"arch": 5}, "model.arch is 5: it must be text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(settings: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: cell(**settings))


def test_unknown_keys_and_wrong_types_are_all_reported() -> None:
    values = {"model": {"widht": 3, "depth": "x"}, "data": 7, "sede": 1}
    message = refusal(lambda: CellSpec.from_dict(values))
    assert "unknown setting 'model.widht' (did you mean 'width'?)" in message
    assert "model.depth is 'x'" in message
    assert "data must be a mapping, got 7" in message
    assert "unknown setting 'sede'" in message


# Overrides


def test_a_setting_goes_by_its_full_or_its_short_name() -> None:
    assert cell(**{"ramp.slope": 1e-3}) == cell(slope=1e-3)
    assert find_field("slope") == find_field("ramp.slope") == "ramp.slope"
    assert find_field("device") == "device"
    assert find_field("nothing") is None


def test_short_names_are_unique() -> None:
    short = [name.rpartition(".")[2] for name in FIELD_NAMES]
    assert len(short) == len(set(short)), "a field added twice can no longer be set by name"


def test_unknown_settings_are_answered_with_the_nearest() -> None:
    message = refusal(lambda: cell(slop=1, probe_evry=2))
    assert "unknown setting 'slop' (did you mean 'slope'?)" in message
    assert "unknown setting 'probe_evry' (did you mean 'probe_every'?)" in message


# Hash


def test_the_hash_sees_no_difference_between_a_default_and_its_value() -> None:
    spelled = {"width": 64, "slope": 1.6e-4, "peak": 0.8, "heads": 4, "init_std": 0.08}
    assert cell(**spelled).hash == CellSpec().hash == CellSpec().resolved().hash


OTHER: dict[str, Any] = {
    "model.arch": "pre_ln",
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.norm": "dyt",
    "model.qk_norm": True,
    "model.module": "pkg.mod:build",
    "data.source": "markov",
    "data.vocab": 999,
    "optim.name": "sgd",
    "optim.lr_scaling": "mup",
    "ramp.protocol": "hold",
    "device": "cuda",
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_the_hash_changes_with_every_setting(name: str) -> None:
    base = CellSpec().resolved()
    outer, _, inner = name.rpartition(".")
    value = getattr(getattr(base, outer) if outer else base, inner)
    other = OTHER[name] if name in OTHER else value * 2
    assert base.replaced({name: other}).hash != base.hash


def test_a_content_hash_ignores_the_order_of_keys() -> None:
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash({"a": 1, "b": 2}) != content_hash({"a": 2, "b": 1})
    assert len(content_hash({})) == 12


@pytest.mark.parametrize("kind", [ModelSpec, DataSpec, OptimSpec, RampSpec, CellSpec])
def test_specs_cannot_be_changed_in_place(kind: type) -> None:
    spec = kind()
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, 1)
