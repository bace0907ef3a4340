"""The contract refuses rule files with a mistake, and says which."""

from pathlib import Path

import pytest
from helpers import refusal

from keelbench.contract import all_passed, check_rule, render_findings

HEAD = """
from dataclasses import dataclass
import torch
from keelbench.archs import Param, ResidualRule

@dataclass(frozen=True)
class Mine(ResidualRule):
    equation = "x <- N(x + F(x))"

    def norm_slots(self, site):
        return ("out",)

"""

RIGHT = """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x))
"""

WRONG = {
    "future": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x) + 0.1 * x.mean(dim=1, keepdim=True))
""",
        "causal",
        "sees the future",
    ),
    "other sequence": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x) + 0.1 * x.roll(x.shape[1] // 2, dims=1).clone())
""",
        "causal",
        "token",
    ),
    "other lane": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x) + x.mean(dim=0, keepdim=True))
""",
        "lane-independent",
        "a lane's logits change with its neighbour",
    ),
    "shape": (
        """
    def step(self, x, branch, norms, site):
        return (x + branch(x)).mean(dim=-1)
""",
        "shape",
        "step returns (1, 16) at site 0 (attention) of 2, not (1, 16, 16)",
    ),
    "branch input": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x[:, :3]))
""",
        "shape",
        "step gives its branch (1, 3, 16) at site 0",
    ),
    "no return": (
        """
    def step(self, x, branch, norms, site):
        norms["out"](x + branch(x))
""",
        "shape",
        "step returns NoneType at site 0",
    ),
    "unused gain": (
        """
    def step(self, x, branch, norms, site):
        if site.index == 1:
            return x + branch(x)
        return norms["out"](x + branch(x))
""",
        "gains used",
        "no gradient reaches 1.ffn.norm_out",
    ),
    "unused branch": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x if site.index == 3 else x + branch(x))
""",
        "gains used",
        "3.ffn.gate_up, 3.ffn.down",
    ),
    "unused parameter": (
        """
    def param_slots(self, site):
        return {"a": Param("scalar", 1.0)}

    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x))
""",
        "gains used",
        "no gradient reaches 0.rule.a, 1.rule.a",
    ),
    "nan": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x.sqrt() + branch(x))
""",
        "finite",
        "the loss is nan at depth 6",
    ),
    "infinite gradient": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x) + (x - x).abs().sqrt())
""",
        "finite",
        "a gradient is not finite",
    ),
    "undeclared norm": (
        """
    def step(self, x, branch, norms, site):
        return norms["outer"](x + branch(x))
""",
        "shape",
        "step uses norms['outer'] at site 0 (attention) of 2, which norm_slots does not name",
    ),
    "undeclared parameter": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + norms.param("a") * branch(x))
""",
        "shape",
        "step uses param('a') at site 0 (attention) of 2, which param_slots does not name",
    ),
    "declared twice": (
        """
    def norm_slots(self, site):
        return ("out", "out")

    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x))
""",
        "declared",
        "declared twice: 0.attention.norm_out",
    ),
    "random": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x) + 0.01 * torch.randn(1, 1, x.shape[2], dtype=x.dtype))
""",
        "deterministic",
        "two calls with the same weights and tokens differ",
    ),
    "in place": (
        """
    def step(self, x, branch, norms, site):
        x += branch(norms["out"](x))
        return x
""",
        "finite",
        "write x = x + ..., not x += ...",
    ),
    "slots as a text": (
        """
    def norm_slots(self, site):
        return ("out")

    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x))
""",
        "declared",
        "norm_slots returns 'out' at site 0 (attention) of 2: return a tuple of names",
    ),
    "no slots": (
        """
    def norm_slots(self, site):
        return None

    def step(self, x, branch, norms, site):
        return x + branch(x)
""",
        "declared",
        "norm_slots returns None",
    ),
    "grows": (
        """
    def step(self, x, branch, norms, site):
        return 2.0 * norms["out"](x + branch(x)) * (site.index + 1)
""",
        "initial loss",
        "ln V is 3.43",
    ),
    "division by zero at one depth": (
        """
    def step(self, x, branch, norms, site):
        return norms["out"](x + branch(x)) / (site.depth - 64)
""",
        "finite",
        "at depth 64",
    ),
}


def rule_file(folder: Path, body: str) -> str:
    path = folder / "rules.py"
    path.write_text(HEAD + body)
    return f"{path}:Mine"


def test_a_right_rule_passes_every_clause(tmp_path: Path) -> None:
    findings = check_rule(rule_file(tmp_path, RIGHT))
    assert all_passed(findings)
    assert [finding.clause for finding in findings] == [
        "declared",
        "shape",
        "finite",
        "deterministic",
        "causal",
        "lane-independent",
        "gains used",
        "initial loss",
    ]


@pytest.mark.parametrize("mistake", WRONG)
def test_a_rule_with_a_mistake_is_refused_with_the_reason(tmp_path: Path, mistake: str) -> None:
    body, clause, reason = WRONG[mistake]
    findings = check_rule(rule_file(tmp_path, body))
    failed = {finding.clause: finding.reason for finding in findings if not finding.passed}
    assert clause in failed, findings
    assert reason in failed[clause]


@pytest.mark.parametrize("mistake", ["nan", "random"])
def test_a_rule_is_not_blamed_for_what_it_did_not_do(tmp_path: Path, mistake: str) -> None:
    """NaN and noise differ from themselves: that is no glance at the future."""
    body, clause, _ = WRONG[mistake]
    findings = check_rule(rule_file(tmp_path, body))
    assert [finding.clause for finding in findings if not finding.passed] == [clause]


def test_an_error_in_a_step_names_the_site(tmp_path: Path) -> None:
    body = RIGHT.replace("return", "x = x if site.index < 3 else x.nothing\n        return")
    (finding,) = [f for f in check_rule(rule_file(tmp_path, body)) if not f.passed]
    assert finding.clause == "shape"
    assert "step raises AttributeError at site 3 (ffn) of 6" in finding.reason


def test_a_rule_without_an_equation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    path.write_text(HEAD.replace('equation = "x <- N(x + F(x))"', "pass") + RIGHT)
    failed = [f for f in check_rule(f"{path}:Mine") if not f.passed]
    assert [f.clause for f in failed] == ["declared"]


def test_what_is_no_rule_is_an_error(tmp_path: Path) -> None:
    assert "no such file" in refusal(lambda: check_rule(f"{tmp_path}/none.py:Mine"))


def test_the_verdict_is_told_with_a_line_per_clause(tmp_path: Path) -> None:
    name = rule_file(tmp_path, RIGHT)
    lines = render_findings("mine", check_rule(name)).splitlines()
    assert lines[0] == "mine: accepted, 8 of 8 clauses hold"
    assert all(line.split()[0] == "ok" for line in lines[1:]) and len(lines) == 9


def test_a_refusal_tells_the_reason_and_what_was_not_tried(tmp_path: Path) -> None:
    name = rule_file(tmp_path, WRONG["shape"][0])
    lines = render_findings("mine", check_rule(name)).splitlines()
    assert lines[0] == "mine: refused, 1 of 8 clauses hold"
    assert lines[2].startswith("  FAILED  shape") and "step returns (1, 16)" in lines[2]
    assert lines[3].split()[0] == "-"


def test_the_model_that_a_rule_is_tried_in_can_be_chosen(tmp_path: Path) -> None:
    body = RIGHT.replace("return", "x = x if site.depth != 10 else x.nothing\n        return")
    name = rule_file(tmp_path, body)
    assert all_passed(check_rule(name, depth=8, width=32))
    assert not all_passed(check_rule(name, depth=10))
    assert "must be even" in refusal(lambda: check_rule(name, depth=3))
