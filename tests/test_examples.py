"""The example loaders and rewards: what users copy has to be right."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from pathlib import Path
from types import ModuleType

import pytest

from areno.api import RewardRecord
from areno.materialize.reward_hook import load_reward_hook

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_" + path.replace("/", "_")[:-3], EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestMathLoader:
    loader = load("math/dataset_loader.py")

    def rows(self, *raw: dict) -> list[dict]:
        return self.loader.load_training_dataset("any", default_loader=lambda _: list(raw))

    def test_gsm8k(self) -> None:
        (row,) = self.rows({"question": "How many?", "answer": "12 * 90 = 1080\n#### 1,080"})
        assert row["solutions"] == ["1080"]
        assert row["prompt"][0]["role"] == "user"
        assert row["prompt"][0]["content"].startswith("How many?\n\n")

    def test_numina_takes_the_last_box_with_its_braces(self) -> None:
        solution = r"First \boxed{7}, then \boxed{\left\{ \frac{1}{2} \right\}} follows."
        (row,) = self.rows({"problem": "P", "solution": solution})
        assert row["solutions"] == [r"\left\{ \frac{1}{2} \right\}"]

    def test_numina_without_an_answer_is_left_out(self) -> None:
        assert (
            self.rows({"problem": "Prove it.", "solution": "Clear."}, {"problem": "P", "solution": r"\boxed{1"}) == []
        )

    def test_normalized_rows_stay(self) -> None:
        row = {"prompt": "P", "solutions": ["1"], "level": 3}
        assert self.rows(row) == [row]

    def test_unknown_rows_name_number_and_columns(self) -> None:
        with pytest.raises(ValueError, match="row 2 has the columns text, label"):
            self.rows({"prompt": "P", "solutions": []}, {"text": "", "label": 1})

    def test_gsm8k_without_mark(self) -> None:
        with pytest.raises(ValueError, match="row 1: the answer does not end in"):
            self.rows({"question": "Q", "answer": "12"})


class TestMathReward:
    reward = load("math/math_verify_reward.py")

    def score(self, completion: str, answer: object) -> float:
        return self.reward.reward_fn(RewardRecord("P", completion, answer=answer))

    @pytest.mark.parametrize(
        ("gold", "completion", "expected"),
        [
            ("72", r"so we get \boxed{72}", 1.0),
            ("72", "First 70, then 2 more. The answer is 72.", 1.0),
            ("72", "<answer>72</answer>", 1.0),
            ("72", "70 + 2 = <answer>71</answer>, no: <answer> $72$ </answer>. That took 3 steps.", 1.0),
            ("x^2+1", r"<answer>\(1 + x^2\)</answer>", 1.0),
            ("1080", r"\boxed{1,080}", 1.0),
            (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
            (r"\boxed{\frac{1}{2}}", "$1/2$", 1.0),
            ("x^2+1", r"\boxed{1 + x^2}", 1.0),
            ("(1,2)", r"\boxed{(1, 2)}", 1.0),
            ("3", r"$x = 3$", 1.0),
            ("72", r"\boxed{71}", 0.0),
            ("72", "I do not know.", 0.0),
            ("72", "", 0.0),
            ("72", "\\boxed{" * 40 + "\x00�", 0.0),
        ],
    )
    def test_scores(self, gold: str, completion: str, expected: float) -> None:
        assert self.score(completion, [gold]) == expected

    def test_any_solution_counts(self) -> None:
        assert self.score("5", ["4", "5"]) == 1.0
        assert self.score("5", "5") == 1.0

    @pytest.mark.parametrize("gold", ["", "   ", r"\frac{1}{", "$$"])
    def test_a_gold_that_cannot_be_read_is_never_a_zero(self, gold: str) -> None:
        with pytest.raises(ValueError, match="cannot read the solution"):
            self.score("72", [gold])

    @pytest.mark.parametrize("answer", [None, []])
    def test_no_gold(self, answer: object) -> None:
        with pytest.raises(ValueError, match="no `solutions`"):
            self.score("72", answer)

    def test_off_the_main_thread_it_fails_loudly(self) -> None:
        said: list[BaseException] = []

        def score() -> None:
            try:
                self.score("73", ["73"])
            except ValueError as error:
                said.append(error)

        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
        assert "thread" in str(said[0])

    @pytest.mark.skipif(os.name != "posix", reason="signal.alarm")
    def test_the_alarm_handler_is_put_back(self) -> None:
        before = signal.getsignal(signal.SIGALRM)
        self.score("1", ["1"])
        assert signal.getsignal(signal.SIGALRM) is before


class TestReasoningGym:
    loader = load("reasoning_gym/dataset_loader.py")
    reward = load("reasoning_gym/reward.py")

    def rows(self, path: str, **options: object) -> list[dict]:
        return self.loader.load_training_dataset(path, default_loader=None, **options)

    @pytest.mark.parametrize("task", ["gsm_symbolic", "basic_arithmetic", "rearc", "zebra_puzzles"])
    def test_own_answers_score_one_after_a_trip_through_json(self, task: str) -> None:
        for row in json.loads(json.dumps(self.rows(f"reasoning_gym:{task}", size=2, seed=3))):
            completion = f"I think. <answer>{row['solutions'][0]}</answer>"
            assert self.reward.reward_fn(RewardRecord("P", completion, source_record=row)) == 1.0
            assert self.reward.reward_fn(RewardRecord("P", "no idea", source_record=row)) < 0.1

    def test_seed_and_size(self) -> None:
        rows = self.rows("reasoning_gym:gsm_symbolic?size=4&seed=9")
        assert rows == self.rows("reasoning_gym:gsm_symbolic", size=4, seed=9)
        assert len(rows) == 4
        assert rows != self.rows("reasoning_gym:gsm_symbolic", size=4, seed=8)

    def test_task_options(self) -> None:
        (row,) = self.rows("reasoning_gym:basic_arithmetic?size=1&min_terms=6&max_terms=6")
        assert row["reasoning_gym"]["options"] == {"size": 1, "seed": 0, "min_terms": 6, "max_terms": 6}

    def test_gsm_symbolic_is_scored_by_the_math_reward(self) -> None:
        score = TestMathReward.reward.reward_fn
        for row in self.rows("reasoning_gym:gsm_symbolic", size=20):
            gold = row["solutions"]
            assert score(RewardRecord("P", f"It is <answer>{gold[0]}</answer>", answer=gold)) == 1.0
            assert score(RewardRecord("P", "It is <answer>-98765</answer>", answer=gold)) == 0.0

    @pytest.mark.parametrize("path", ["gsm8k:main", "reasoning_gym", "reasoning_gym:", "reasoning_gym:no_such_task"])
    def test_bad_paths(self, path: str) -> None:
        with pytest.raises(ValueError, match=r"reasoning_gym|reasoning-gym"):
            self.rows(path)


@pytest.mark.parametrize("path", ["math/math_verify_reward.py", "reasoning_gym/reward.py"])
def test_the_rewards_load_as_hooks(path: str) -> None:
    assert callable(load_reward_hook(EXAMPLES / path).fn)
