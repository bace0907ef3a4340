"""Other people's logs: what can be read, what is repaired, and what is refused."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keelbench.divergence import judge
from keelbench.errors import KeelbenchError
from keelbench.logs import LogTrace, read_log
from keelbench.records import Rule, VerdictKind, max_lr_of


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Read a log given as text (or bytes): ``read("step,lr,loss\\n0,...")``."""

    def reader(content: str | bytes, **options: Any) -> LogTrace:
        path = tmp_path / "run.log"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_log(path, **options)

    return reader


@pytest.fixture
def refusal(read: Any) -> Any:
    """Message and hint of the error that a log is refused with."""

    def refused(content: str | bytes, **options: Any) -> str:
        with pytest.raises(KeelbenchError) as caught:
            read(content, **options)
        assert caught.value.message.strip()
        return f"{caught.value.message} | {caught.value.hint}"

    return refused


def csv_of(header: str, *rows: str) -> str:
    return "\n".join([header, *rows]) + "\n"


def descent(steps: int) -> np.ndarray:
    return 2.2 + 2.8 * np.exp(-np.arange(steps) / 20)


PLAIN = csv_of("step,lr,loss,grad_norm,probe", "0,1e-5,5.0,1.5,5.1", "1,2e-5,4.8,1.2,")


class TestFormats:
    def test_csv(self, read: Any) -> None:
        log = read(PLAIN, unigram_entropy=3.07)
        assert log.trace.lr.tolist() == [1e-5, 2e-5]
        assert log.trace.loss.tolist() == [5.0, 4.8]
        assert log.trace.grad_norm.tolist() == [1.5, 1.2]
        assert log.trace.probe_step.tolist() == [0] and log.trace.probe.tolist() == [5.1]
        assert log.trace.unigram_entropy == 3.07
        assert log.steps.tolist() == [0, 1] and log.notes == []

    def test_json_lines(self, read: Any) -> None:
        rows = [{"step": 0, "lr": 1e-5, "loss": 5.0, "text": {"a": 1}}, {"step": 1, "lr": 2e-5}]
        rows[1] |= {"loss": 4.8, "probe": 5.0}
        log = read("\n".join(map(json.dumps, rows)))
        assert log.trace.loss.tolist() == [5.0, 4.8]
        assert log.trace.probe_step.tolist() == [1] and log.trace.grad_norm is None

    @pytest.mark.parametrize(
        "disguise",
        [
            lambda text: b"\xef\xbb\xbf" + text.encode(),
            lambda text: text.replace("\n", "\r\n").encode(),
            lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
            lambda text: text.replace(",", ";").encode(),
            lambda text: text.replace(",", "\t").encode(),
            lambda text: ("\n" + text).replace("\n", "\n\n").encode(),
            lambda text: text.rstrip("\n").encode(),
        ],
        ids=["bom", "crlf", "bom-crlf", "semicolons", "tabs", "blank-lines", "no-last-newline"],
    )
    def test_in_every_disguise(self, read: Any, disguise: Any) -> None:
        log = read(disguise(PLAIN))
        assert log.trace.loss.tolist() == [5.0, 4.8] and log.notes == []

    def test_json_lines_with_bom_and_crlf(self, read: Any) -> None:
        line = b'{"step": 0, "lr": 1e-5, "loss": 5.0}\r\n'
        assert read(b"\xef\xbb\xbf" + line).trace.loss.tolist() == [5.0]

    def test_wandb_export(self, read: Any) -> None:
        log = read(
            csv_of(
                '"Step","keel-7 - train/loss","keel-7 - train/loss__MIN",'
                '"keel-7 - train/loss__MAX","keel-7 - lr","keel-7 - _step"',
                '"0","5.0","5.0","5.0","1e-5","0"',
                '"10","4.0","4.0","4.0","2e-5","10"',
            )
        )
        assert log.trace.loss.tolist() == [5.0, 4.0]
        assert log.steps.tolist() == [0, 10]

    def test_tensorboard_export(self, read: Any, refusal: Any) -> None:
        export = csv_of("Wall time,Step,Value", "1700000000.1,0,5.0", "1700000001.2,10,4.0")
        assert read(export, slope=1e-5).trace.lr.tolist() == pytest.approx([1e-5, 11e-5])
        assert "slope=" in refusal(export)

    def test_hugging_face_history(self, read: Any) -> None:
        """Train and eval rows share steps; the last row sums up the run."""
        rows = [
            {"loss": 5.0, "learning_rate": 1e-5, "grad_norm": 1.0, "step": 10},
            {"eval_loss": 5.1, "step": 10},
            {"loss": 4.0, "learning_rate": 2e-5, "grad_norm": 1.0, "step": 20},
            {"train_loss": 4.5, "train_runtime": 9.0, "step": 20},
        ]
        log = read("\n".join(map(json.dumps, rows)))
        assert log.trace.loss.tolist() == [5.0, 4.0] and log.steps.tolist() == [10, 20]
        assert log.trace.probe.tolist() == [5.1] and log.trace.probe_step.tolist() == [0]
        assert log.notes == []

    def test_thousands_of_other_columns(self, read: Any) -> None:
        extra = [f"layer{number}/grad" for number in range(5000)]
        zeros = ",".join("0" * len(extra))
        log = read(csv_of(",".join(["step", *extra, "lr", "loss"]), f"0,{zeros},1e-5,5.0"))
        assert log.trace.loss.tolist() == [5.0]


class TestColumns:
    @pytest.mark.parametrize(
        "name", ["Loss", "train_loss", "train/loss", "Train Loss", " loss "]
    )
    def test_are_found_by_their_usual_names(self, read: Any, name: str) -> None:
        assert read(csv_of(f"Step,Learning_Rate,{name}", "0,1e-5,5.0")).trace.loss[0] == 5.0

    def test_their_own_name_comes_first(self, read: Any) -> None:
        log = read(csv_of("_step,step,lr,loss,train_loss", "70,7,1e-5,5.0,6.0"))
        assert log.trace.loss[0] == 5.0 and log.steps[0] == 7

    def test_what_wandb_counts_comes_last(self, read: Any) -> None:
        log = read(csv_of("r - _step,r - global_step,r - lr,r - loss", "70,7,1e-5,5.0"))
        assert log.steps[0] == 7
        assert read(csv_of("_step,lr,loss", "70,1e-5,5.0")).steps[0] == 70

    def test_that_are_named_must_match_exactly(self, read: Any, refusal: Any) -> None:
        log = csv_of("step,lr,loss,my_loss", "0,1e-5,5.0,6.0")
        assert read(log, loss="my_loss").trace.loss[0] == 6.0
        assert "did you mean 'my_loss'" in refusal(log, loss="My_Loss")

    def test_that_are_ambiguous_are_refused_with_the_candidates(self, refusal: Any) -> None:
        both = refusal(csv_of("step,lr,train_loss,train/loss", "0,1e-5,5.0,6.0"))
        assert "'train_loss', 'train/loss'" in both and "loss=" in both
        runs = refusal(csv_of("Step,a - loss,b - loss,a - lr", "0,5.0,6.0,1e-5"))
        assert "'a - loss', 'b - loss'" in runs

    def test_that_are_missing_are_refused_with_what_is_there(self, refusal: Any) -> None:
        assert "it has 'step', 'lr', 'acc'" in refusal(csv_of("step,lr,acc", "0,1e-5,0.5"))
        assert "no column 'lr'" in refusal(csv_of("step,loss", "0,5.0"))
        many = ",".join(f"c{number}" for number in range(1000))
        assert "and 980 more" in refusal(csv_of(many, many.replace("c", "")))

    def test_twice_the_same_name_is_refused(self, refusal: Any) -> None:
        assert "two columns named 'loss'" in refusal(csv_of("step,lr,loss,loss", "0,1,5,6"))

    def test_without_steps_rows_are_numbered(self, read: Any) -> None:
        log = read(csv_of("lr,loss", "1e-5,5.0", "2e-5,4.0"))
        assert log.steps.tolist() == [0, 1] and "numbered from 0" in log.notes[0]


class TestRows:
    def test_keep_the_log_s_own_steps(self, read: Any) -> None:
        rows = [
            f"{10 * row},{1e-5 * (row + 1)},{loss}" for row, loss in enumerate(descent(200))
        ]
        rows[120] = f"1200,{1e-5 * 121},nan"
        log = read(csv_of("step,lr,loss", *rows))
        verdict = judge(log.trace)
        assert verdict is not None and verdict.rule is Rule.NON_FINITE
        assert verdict.onset_step == 120
        assert log.in_log_steps(verdict).onset_step == 1200
        assert log.in_log_steps(verdict).detected_step == 1200
        assert max_lr_of(log.trace, verdict) == pytest.approx(120e-5)

    def test_other_verdicts_need_no_translation(self, read: Any) -> None:
        rows = [f"{10 * row},1e-5,{loss}" for row, loss in enumerate(descent(100))]
        log = read(csv_of("step,lr,loss", *rows))
        survived = judge(log.trace)
        assert survived is not None and log.in_log_steps(survived) == survived
        failed = read(csv_of("step,lr,loss", "50,1e-5,nan", "60,1e-5,nan"))
        verdict = judge(failed.trace)
        assert verdict is not None and verdict.kind is VerdictKind.FAILED
        assert failed.in_log_steps(verdict).reason == "non-finite at step 50"

    def test_out_of_order_are_sorted_and_it_is_said(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", "20,3e-5,3.0", "0,1e-5,5.0", "10,2e-5,4.0"))
        assert log.trace.loss.tolist() == [5.0, 4.0, 3.0]
        assert log.steps.tolist() == [0, 10, 20]
        assert ["sorted" in note for note in log.notes] == [True]

    def test_written_twice_alike_count_once(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", "0,1e-5,5.0", "1,2e-5,nan", "1,2e-5,nan"))
        assert log.trace.steps == 2 and log.notes == []

    def test_of_a_resumed_run_win(self, read: Any) -> None:
        log = read(
            csv_of(
                "step,lr,loss",
                *("0,1e-5,5.0", "1,2e-5,4.0", "2,3e-5,nan"),
                *("step,lr,loss", "1,2e-5,4.1", "2,3e-5,3.1", "3,4e-5,3.0"),
            )
        )
        assert log.trace.loss.tolist() == [5.0, 4.1, 3.1, 3.0]
        assert any("2 steps (1 to 2)" in note and "last" in note for note in log.notes)

    def test_of_a_long_resumed_run_win_in_the_order_of_the_file(self, read: Any) -> None:
        rows = [f"{step},1e-5,{run}" for run in range(4) for step in range(100)]
        assert set(read(csv_of("step,lr,loss", *rows)).trace.loss) == {3.0}

    def test_of_the_same_step_are_merged(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss,val_loss", "0,1e-5,5.0,", "0,,,5.2", "1,2e-5,4.0,"))
        assert log.trace.probe.tolist() == [5.2] and log.notes == []

    def test_without_a_step_are_left_out_and_it_is_said(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", ",1e-5,9.0", "1,2e-5,4.0"))
        assert log.trace.loss.tolist() == [4.0] and "1 rows without a step" in log.notes[0]

    def test_cut_off_at_the_end_are_left_out_and_it_is_said(self, read: Any) -> None:
        assert (
            "line 3 is cut off" in read(csv_of("step,lr,loss", "0,1e-5,5.0", "1,2e")).notes[0]
        )
        lines = '{"step": 0, "lr": 1e-5, "loss": 5.0}\n{"step": 1, "lr'
        assert "line 2 is cut off" in read(lines).notes[0]

    def test_cut_off_in_the_middle_are_refused(self, refusal: Any) -> None:
        assert "line 2" in refusal(csv_of("step,lr,loss", "0,1e-5", "1,2e-5,4.0"))
        assert "line 1" in refusal('{"step": 0,\n{"step": 1, "lr": 1e-5, "loss": 5.0}')

    @pytest.mark.parametrize("step", ["0.5", "-1", "nan", "inf", "1e300"])
    def test_with_impossible_steps_are_refused(self, refusal: Any, step: str) -> None:
        said = refusal(csv_of("step,lr,loss", "0,1e-5,5.0", f"{step},2e-5,4.0"))
        assert "line 3" in said and "whole number" in said and "step=" in said


class TestValues:
    @pytest.mark.parametrize("text", ["NaN", "nan", "NAN", " nan "])
    def test_nan_is_a_loss_that_is_not_finite(self, read: Any, text: str) -> None:
        log = read(csv_of("step,lr,loss", "0,1e-5,5.0", f"1,2e-5,{text}", "2,3e-5,4.0"))
        assert np.isnan(log.trace.loss).tolist() == [False, True, False]

    @pytest.mark.parametrize("text", ["inf", "Infinity", "INF", "+inf", "1e999"])
    def test_so_is_infinity(self, read: Any, text: str) -> None:
        log = read(csv_of("step,lr,loss", "0,1e-5,5.0", f"1,2e-5,{text}"))
        assert log.trace.loss[1] == math.inf

    def test_json_has_both(self, read: Any) -> None:
        lines = [
            '{"step": 0, "lr": 1, "loss": NaN}',
            '{"step": 1, "lr": 1, "loss": "Infinity"}',
        ]
        loss = read("\n".join(lines)).trace.loss
        assert math.isnan(loss[0]) and loss[1] == math.inf

    @pytest.mark.parametrize("text", ["", "null", "None", " "])
    def test_a_loss_that_ends_before_the_log_does_was_lost(self, read: Any, text: str) -> None:
        rows = [f"{step},1e-5,{5 - step / 10}" for step in range(20)]
        log = read(csv_of("step,lr,loss", *rows, f"20,1e-5,{text}", f"21,1e-5,{text}"))
        assert np.flatnonzero(np.isnan(log.trace.loss)).tolist() == [20, 21]
        assert "empty from step 20" in log.notes[0] and "not finite" in log.notes[0]

    def test_json_null_at_the_end_as_well(self, read: Any) -> None:
        lines = [f'{{"step": {step}, "lr": 1e-5, "loss": 5.0}}' for step in range(5)]
        log = read("\n".join([*lines, '{"step": 5, "lr": 1e-5, "loss": null}']))
        assert math.isnan(log.trace.loss[-1]) and len(log.trace.loss) == 6

    def test_a_loss_that_is_logged_now_and_then_has_gaps(self, read: Any) -> None:
        rows = [f"{step},1e-5,{'' if step % 10 else 5.0}" for step in range(58)]
        log = read(csv_of("step,lr,loss", *rows))
        assert log.steps.tolist() == [0, 10, 20, 30, 40, 50] and log.notes == []

    def test_rows_of_another_kind_at_the_end_are_no_loss_of_loss(self, read: Any) -> None:
        log = read(
            csv_of("step,lr,loss,val_loss", "0,1e-5,5.0,", "1,2e-5,4.0,", "2,,,4.1", "3,,,")
        )
        assert log.trace.loss.tolist() == [5.0, 4.0] and log.trace.probe.tolist() == [4.1]
        assert any("put to the row before" in note for note in log.notes)

    def test_probes_may_be_empty_or_nan_where_there_are_none(self, read: Any) -> None:
        log = read(
            csv_of(
                "step,lr,loss,probe", "0,1,5.0,5.1", "1,1,4.0,", "2,1,3.0,nan", "3,1,2.0,3.1"
            )
        )
        assert log.trace.probe_step.tolist() == [0, 3] and log.trace.probe.tolist() == [
            5.1,
            3.1,
        ]
        bare = read(csv_of("step,lr,loss,probe", "0,1e-5,5.0,"))
        assert bare.trace.probe is None and bare.trace.probe_step is None

    def test_an_infinite_probe_counts(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss,probe", "0,1e-5,5.0,5.1", "1,2e-5,4.0,inf"))
        verdict = judge(log.trace)
        assert verdict is not None and verdict.rule is Rule.NON_FINITE

    def test_a_missing_lr_is_interpolated_and_it_is_said(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", "0,1e-5,5.0", "1,,4.0", "2,3e-5,3.0"))
        assert log.trace.lr.tolist() == pytest.approx([1e-5, 2e-5, 3e-5])
        assert "interpolated" in log.notes[0]

    def test_an_lr_that_falls_is_said(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", "0,1e-5,5.0", "1,2e-5,4.0", "2,1e-5,3.0"))
        assert "not a pure ramp" in log.notes[0]

    def test_slope_replaces_the_column(self, read: Any) -> None:
        log = read(csv_of("step,lr,loss", "0,7,5.0", "9,7,4.0"), slope=2e-5)
        assert log.trace.lr.tolist() == pytest.approx([2e-5, 20e-5])

    @pytest.mark.parametrize("column", ["lr", "loss", "probe", "step"])
    def test_words_are_refused_with_their_place(self, refusal: Any, column: str) -> None:
        cells = {"step": "7", "lr": "1e-5", "loss": "5.0", "probe": "5.0"}
        cells[column] = "high"
        said = refusal(csv_of("step,lr,loss,probe", "0,1e-5,5.0,5.0", ",".join(cells.values())))
        assert "line 3" in said and f"'{column}'" in said and "'high'" in said

    @pytest.mark.parametrize("lr", ["-1e-5", "inf"])
    def test_impossible_lrs_are_refused(self, refusal: Any, lr: str) -> None:
        said = refusal(csv_of("step,lr,loss", "0,1e-5,5.0", f"70,{lr},4.0"))
        assert "step 70" in said and "must be finite" in said

    @pytest.mark.parametrize("option", ["slope", "unigram_entropy"])
    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    def test_impossible_options_are_refused(
        self, refusal: Any, option: str, value: float
    ) -> None:
        assert option in refusal(PLAIN, **{option: value})


class TestRefusedFiles:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is empty"),
            (b"\n\n", "is empty"),
            (b"\xef\xbb\xbf", "is empty"),
            (b"step,lr,loss\n", "a header, but no rows"),
            (b"0,1e-5,5.0\n1,2e-5,4.0\n", "no header"),
            (b"\x80\x02}q\x00.", "not a text file"),
            (b"PK\x03\x04\x00\x00\x00", "not a text file"),
            ("step,lr,loss\n0,1,2\n".encode("utf-16"), "not a text file"),
            (b"step,lr,loss,caf\xe9\n0,1,2,3\n", "not a text file"),
            (b'[{"step": 0}]', "is a JSON array"),
            (b'{"step": 0}\n[1]\n', "line 2"),
            (b"step,lr,loss\n,1,2\n", "steps is empty"),
            (b"step,lr,loss\n0,1,\n", "losses is empty"),
            (b"step,lr,loss\n0,,2\n", "learning rates is empty"),
            (b'step,lr,loss\n0,1,"' + b"9" * 200_000 + b"\n", "line "),
        ],
    )
    def test_say_what_they_are(self, refusal: Any, content: bytes, said: str) -> None:
        assert said in refusal(content)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(KeelbenchError, match="is a folder"):
            read_log(tmp_path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(KeelbenchError, match="No such file"):
            read_log(tmp_path / "nothing.csv")


def test_a_hundred_thousand_rows_take_no_time(read: Any) -> None:
    """A million rows in a few seconds; a tenth of it here."""
    count = 100_000
    rows = (f"{step},{step + 1}e-6,{5 - step * 1e-5},1.0," for step in range(count))
    text = csv_of("step,lr,loss,grad_norm,probe", *rows)
    start = time.process_time()
    assert read(text).trace.steps == count
    assert time.process_time() - start < 1.5
