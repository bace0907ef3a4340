"""Names to objects: literal calls, references, entry points, near misses."""

import sys
from keyword import iskeyword
from pathlib import Path

import pytest
from helpers import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keelbench.errors import ExitCode, KeelbenchError, RunFailedError
from keelbench.registry import (
    Registry,
    did_you_mean,
    format_call,
    load_object,
    parse_call,
)

WORDS = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda word: word not in ("true", "false") and not iskeyword(word)
)
LITERALS = (
    st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_characters=":"), max_size=8)
)


# parse_call


def test_literals_are_read_as_what_they_look_like() -> None:
    name, arguments = parse_call("rule(a=1, b=2.5e-3, c=true, d=word, e='two words', f=None)")
    assert name == "rule"
    assert arguments == {
        "a": 1,
        "b": 2.5e-3,
        "c": True,
        "d": "word",
        "e": "two words",
        "f": None,
    }


def test_a_reference_keeps_its_module_or_path() -> None:
    assert parse_call("pkg.mod:Rule(a=1)") == ("pkg.mod:Rule", {"a": 1})
    assert parse_call("some dir/f.py:Rule(a=1)") == ("some dir/f.py:Rule", {"a": 1})
    assert parse_call("some dir/f.py:Rule") == ("some dir/f.py:Rule", {})


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS, st.dictionaries(WORDS, LITERALS, max_size=3))
def test_formatting_and_parsing_are_inverse(name: str, arguments: dict[str, object]) -> None:
    text = format_call(name, arguments)
    assert parse_call(text) == (name, arguments)


@pytest.mark.parametrize("word", ["true", "false", "None", "True", "lambda"])
def test_text_that_looks_like_something_else_stays_text(word: str) -> None:
    assert parse_call(format_call("rule", {"a": word})) == ("rule", {"a": word})


def test_no_code_is_evaluated() -> None:
    assert "cannot read" in refusal(lambda: parse_call("rule(a=__import__('os').getpid())"))


# did_you_mean


def test_only_a_near_miss_is_suggested() -> None:
    assert did_you_mean("kel", ["keel", "pre_ln"]) == " (did you mean 'keel'?)"
    assert did_you_mean("zebra", ["keel", "pre_ln"]) == ""


# load_object


def test_an_object_is_loaded_from_module_or_file(tmp_path: Path) -> None:
    assert load_object("keelbench.errors:KeelbenchError") is KeelbenchError
    file = tmp_path / "a file.py"
    file.write_text("value = []\n")
    assert load_object(f"{file}:value") is load_object(f"{file}:value")


def test_a_file_with_an_error_is_refused_and_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("value = 1 / 0\n")
    message = refusal(lambda: load_object(f"{file}:value"))
    assert "cannot import" in message and "ZeroDivisionError" in message
    file.write_text("value = 1\n")
    assert load_object(f"{file}:value") == 1


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere.at.all:thing", "cannot import 'nowhere.at.all'"),
        ("keelbench.errors:KeelbenchEror", "did you mean 'KeelbenchError'?"),
        ("missing/file.py:thing", "no such file: missing/file.py"),
        ("just_a_name", "names no object"),
        (":thing", "names no object"),
        ("keelbench.errors:", "names no object"),
    ],
)
def test_a_reference_to_nothing_says_what_is_missing(reference: str, said: str) -> None:
    assert said in refusal(lambda: load_object(reference))


# Registry


def fresh() -> Registry:
    registry = Registry("thing", "keelbench.tests.things")
    registry.register("hammer", "math:pi")
    registry.register("saw", print)
    return registry


def test_names_keep_their_order_and_references_are_loaded_on_demand() -> None:
    registry = fresh()
    assert registry.names() == ["hammer", "saw"]
    assert registry.get("hammer") == pytest.approx(3.14159, abs=1e-5)
    assert registry.get("saw") is print
    assert registry.get("math:e") == pytest.approx(2.71828, abs=1e-5)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    message = refusal(lambda: fresh().get("hamer"))
    assert "unknown thing 'hamer'" in message
    assert "did you mean 'hammer'?" in message
    assert "known: hammer, saw" in message


def test_a_name_cannot_be_taken_twice() -> None:
    assert "'saw' is registered twice" in refusal(lambda: fresh().register("saw", len))


def install(folder: Path, name: str, value: str) -> None:
    """A distribution with one entry point, as pip would leave it."""
    package = folder / f"plugin_{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\n")
    (package / "entry_points.txt").write_text(f"[keelbench.tests.things]\n{name} = {value}\n")


def test_an_installed_package_adds_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "drill", "math:tau")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert fresh().names() == ["hammer", "saw", "drill"]
    assert fresh().get("drill") == pytest.approx(6.28318, abs=1e-5)


def test_an_installed_package_cannot_take_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "saw", "math:tau")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    message = refusal(lambda: fresh().names())
    assert "'saw' is registered twice" in message and "math:tau" in message


# Errors


def test_a_users_mistake_and_a_failed_run_have_their_exit_codes() -> None:
    assert KeelbenchError("wrong").exit_code == ExitCode.USAGE == 2
    assert RunFailedError("broke").exit_code == ExitCode.FAILED == 5
    assert ExitCode.INTERRUPTED == 130
