"""The examples of deploy/ name what exists: commands, options, files, ports, and as many CPUs and GPUs as their roles ask for."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowstead.fleet.ray_launch import RoleResources
from rowstead.records.run_folder import RunFolder
from rowstead.spec.fleet import parse_fleet
from tests.small_runs import small_plain
from tests.test_docs import check_rowstead

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
EXAMPLES = sorted(DEPLOY.glob("*.yaml"))
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
OBJECTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in EXAMPLES}


def find(node: Any, key: str) -> list[Any]:
    """All values of a key, at any depth."""
    if isinstance(node, dict):
        return [value for name, value in node.items() if name == key] + [
            hit for value in node.values() for hit in find(value, key)
        ]
    return [hit for value in node for hit in find(value, key)] if isinstance(node, list) else []


def command_of(example: str) -> list[str]:
    """The words that an example runs."""
    (words,) = [*find(OBJECTS[example], "command"), *map(shlex.split, find(OBJECTS[example], "entrypoint"))]
    return [str(word) for word in words]


@pytest.mark.parametrize("example", OBJECTS)
def test_an_example_runs_a_command_that_exists(example: str) -> None:
    shell, script, folder, recipe, *options = command_of(example)
    assert (shell, script) == ("sh", "/opt/rowstead/train.sh")
    check_rowstead(["train", recipe, "--out", folder, *options])
    mounted = {mount["mountPath"] for mounts in find(OBJECTS[example], "volumeMounts") for mount in mounts}
    assert all(Path(path).parts[1] == "shared" for path in (folder, recipe))
    assert "/shared" in mounted


@pytest.mark.parametrize("example", OBJECTS)
def test_pods_run_as_one_user_and_have_the_image_of_the_page(example: str) -> None:
    users = {context["runAsUser"] for context in find(OBJECTS[example], "securityContext")}
    assert users == {1000}
    assert "useradd --uid 1000" in (DEPLOY / "Dockerfile").read_text()
    (image,) = set(find(OBJECTS[example], "image"))
    assert f"-t {image} ." in PAGE


@pytest.mark.parametrize("example", OBJECTS)
def test_ports_of_an_example_are_those_of_the_page(example: str) -> None:
    ports = {*find(OBJECTS[example], "containerPort"), *find(OBJECTS[example], "port")}
    table = PAGE.split("## Ports to open", 1)[1]
    assert {port for port in ports if not re.search(rf"\b{port}\b", table)} == set()
    assert bool(ports) == (example != "one-gpu.yaml")
    if ports:
        (policy,) = [found for found in OBJECTS[example] if found["kind"] == "NetworkPolicy"]
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": labels}}]}
        assert all(
            labels.items() <= (template.get("metadata", {}).get("labels", {})).items()
            for template in find(OBJECTS[example], "template")
        )


def test_the_page_says_of_each_command_what_the_page_on_security_says() -> None:
    commands = re.findall(r"^\| (`.*?) \| ", PAGE.split("## Ports to open", 1)[1], re.MULTILINE)
    known = re.findall(r"^\| (`.*?) \| ", SECURITY.split("## What listens where", 1)[1], re.MULTILINE)
    assert len(commands) == 5
    assert set(commands) <= set(known)
    ui = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("## rowstead ui", 1)[1]
    (port,) = re.findall(r"any free port\.\s+\[default: (\d+)", ui)[:1]
    assert f"{port} on loopback" in PAGE


def test_the_roles_fit_the_workers_of_the_ray_cluster() -> None:
    options = command_of("kuberay.yaml")
    fleet = parse_fleet(options[options.index("--fleet") + 1])
    assert fleet.start == "ray"
    (groups,) = find(OBJECTS["kuberay.yaml"], "workerGroupSpecs")
    cpus = sum(group["replicas"] * int(group["rayStartParams"]["num-cpus"]) for group in groups)
    assert len(fleet.roles()) * RoleResources(num_cpus=fleet.ray_cpus).num_cpus <= cpus
    for group in groups:
        (limits,) = find(group, "limits")
        assert limits["cpu"] == int(group["rayStartParams"]["num-cpus"])
    assert f"{len(fleet.roles())} roles" in PAGE.replace("\n", " ")


def test_torchrun_of_the_example_has_as_many_nodes_and_gpus_as_the_job() -> None:
    (launch,) = [one["value"] for env in find(OBJECTS["torchrun.yaml"], "env") for one in env if one["name"] == "LAUNCH"]
    words = dict(zip(*(iter(shlex.split(launch)[1:]),) * 2, strict=False))
    (job,) = [found for found in OBJECTS["torchrun.yaml"] if found["kind"] == "Job"]
    (service,) = [found for found in OBJECTS["torchrun.yaml"] if found["kind"] == "Service"]
    (limits,) = find(job, "limits")
    assert int(words["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(words["--nproc-per-node"]) == limits["nvidia.com/gpu"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert words["--rdzv-endpoint"] == f"{job['metadata']['name']}-0.{name}:{port}"
    assert words["-m"] == "rowstead"
    known = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True, check=True
    )
    assert all(option in known.stdout for option in words if option.startswith("--"))


def test_the_image_copies_files_that_exist() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert [path for line in copied for path in line.split() if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_script_starts_a_run_and_then_resumes_it(tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump({**small_plain(), "train": {**small_plain()["train"], "max_steps": 3}}))
    program = tmp_path / "rowstead"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rowstead "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    words = ["sh", str(DEPLOY / "train.sh"), str(tmp_path / "run"), str(recipe), "--set", "train.log_every=7"]
    environment = {**os.environ, "LAUNCH": str(program)}
    first = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert "finished after 3 steps" in first.stdout
    assert RunFolder.open(str(tmp_path / "run"), tmp_path).read_spec().train.log_every == 7
    second = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert f"resuming {tmp_path / 'run'} after step 3" in second.stdout
