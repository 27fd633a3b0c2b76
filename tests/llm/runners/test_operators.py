"""Choosing the implementation of each operator: two ways to set it, refused combinations, and the report."""

from __future__ import annotations

import pytest

from pace.llm.operators import OPERATORS, OperatorConfig, OperatorReport, OperatorRun, read_backend


def test_what_is_not_said_is_native():
    config = OperatorConfig(attention="torch", norm="native")
    assert {name for name in OPERATORS if getattr(config, name) == "torch"} == {"attention"}
    assert OperatorConfig() == OperatorConfig(mlp="native") != config


def test_text_is_read_and_written():
    for text in ("native", "norm=torch", "norm=torch,attention=torch"):
        assert str(read_backend(text)) == text
    assert read_backend(" mlp = torch , norm=native") == OperatorConfig(mlp="torch")
    assert hash(OperatorConfig.parse("mlp=torch")) == hash(OperatorConfig(mlp="torch"))


@pytest.mark.parametrize(
    "choices, words",
    [
        ({"atention": "torch"}, "'atention'; did you mean 'attention'"),
        ({"Mlp": "torch"}, "did you mean 'mlp'"),
        ({"ATTENTION": "torch"}, "did you mean 'attention'"),
        ({"mlp": "cuda"}, "mlp can be run by 'native' or 'torch'; got 'cuda'"),
        ({"mlp": None}, "got None"),
    ],
)
def test_what_is_unknown_is_refused(choices, words):
    with pytest.raises(ValueError, match=words):
        OperatorConfig(**choices)


@pytest.mark.parametrize(
    "text", ["mlp=", "=torch", "mlp=torch,", "mlp=torch,mlp=native", "mlp=torch=torch", "native,mlp=torch"]
)
def test_text_that_is_no_choice_is_refused(text):
    with pytest.raises(ValueError):
        read_backend(text)


def test_an_unknown_backend_names_the_known_ones():
    for wrong in ("cuda", "", None, ["native"]):
        with pytest.raises(ValueError, match="'native', 'native-eager', 'torch'.*attention=torch"):
            read_backend(wrong)


def test_the_report_shows_every_operator():
    report = OperatorReport(
        "op by op", [OperatorRun("norm", "native", 12, 0.25), OperatorRun("attention", "torch", 3, None)]
    )
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["operator", *OPERATORS]
    assert lines[2].split() == ["norm", "native", "12", "0.250"] and lines[5].split() == [
        "attention",
        "torch",
        "3",
        "-",
    ]
    assert lines[1].split() == ["embedding", "did", "not", "run", "0", "-"]
    assert report["norm"].calls == 12
    with pytest.raises(KeyError):
        report["mlp"]
