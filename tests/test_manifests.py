"""The manifests in `examples/` are what Kubernetes and SkyPilot take, and start a worker as the command line has it.

They are checked, not run. Kubernetes: every field against the schemas of its API, without unknown ones. SkyPilot has
its schemas in a package with dozens of dependencies, some of which do not fit ours: the task is checked by them where
that package is installed, and otherwise only for fields that its documentation has.
"""

import shlex
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from command_line import COMMANDS
from rewound.experiments.executors.working import STOPPED

EXAMPLES = Path(__file__).parents[1] / "examples"
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
RESOURCES = {"accelerators", "cpus", "memory", "disk_size", "infra", "use_spot", "job_recovery", "image_id"}
"""Fields of SkyPilot's tasks that its documentation has."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text())  # type: ignore[no-any-return]


def check_worker(script: str) -> None:
    """The shell takes the script, and its last command is one that `rewound work` has."""
    subprocess.run(["sh", "-n", "-c", script], check=True)
    *_, command = script.strip().splitlines()
    words = shlex.split(command.partition("exec rewound work ")[2])
    known = {option for parameter in COMMANDS["work"].params for option in parameter.opts}
    assert words[1] == "--store"
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_kubernetes(version: str) -> None:
    job = read("kubernetes.yaml")
    kubernetes_validate.validate(job, version, strict=True)
    misspelt = deepcopy(job)
    misspelt["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(misspelt, version, strict=True)


def test_a_pod_of_kubernetes() -> None:
    """What the schema does not say: names agree, and a worker that has stopped is followed by another."""
    spec = read("kubernetes.yaml")["spec"]
    pod = spec["template"]["spec"]
    (worker,) = pod["containers"]
    check_worker(worker["args"][0].replace("&& ", "&&\n"))
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    again, _, never = spec["podFailurePolicy"]["rules"]
    assert again["onExitCodes"] == {"containerName": worker["name"], "operator": "In", "values": [STOPPED]}
    assert never["onExitCodes"] == {"containerName": worker["name"], "operator": "In", "values": [1, 2]}
    assert pod["restartPolicy"] == "Never", "as the API demands beside a podFailurePolicy"


def test_skypilot() -> None:
    task = read("skypilot.yaml")
    resources = task["resources"]
    assert task.keys() <= TASK
    assert resources.keys() <= RESOURCES
    assert resources["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert set(task["secrets"].values()) == {None}, "they are given when it is launched"
    check_worker(task["run"])
    subprocess.run(["sh", "-n", "-c", task["setup"]], check=True)


def test_skypilot_by_its_own_schemas() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    task = read("skypilot.yaml")
    jsonschema.validate({**task, "resources": {}}, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
