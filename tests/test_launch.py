"""The scripts in launch/, as far as they run without a cluster."""

import configparser
import contextlib
import os
import re
import shlex
import stat
import subprocess
import sys

import pytest
import yaml

from clover_jax import serve, train
from clover_jax.cli.command_flags import parse_flags
from tests.conftest import REPOSITORY, run_program

FLAGS = ("--flagfile=experiments/clover2.flags", "--data=a file.jsonl", '--workdir=runs/"x"')


def launch(script, *arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    script = REPOSITORY / "launch" / script
    return run_program(script, *arguments, env=environment, **variables)


def dry_run(script, *arguments, **variables):
    return launch(script, *arguments, DRY_RUN="1", **variables).stdout


def executable(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("script", ["slurm", "gke_jobset", "tpu_vm"])
def test_the_example_of_a_script_names_base_data_and_workdir(script):
    """Run as it is printed; the recipe's own base is gated, and its data lie nowhere yet."""
    comments = (REPOSITORY / "launch" / script).read_text().replace("\\\n#", "").splitlines()
    (example,) = [line[1:] for line in comments if line[:1] == "#" and " --flagfile=" in line]
    printed = run_program("bash", "-c", f"export DRY_RUN=1; {example}").stdout
    assert "--base=/" in printed
    assert "--data=/" in printed
    assert "/runs/l8b" in printed
    flags = [word for word in shlex.split(example) if word.startswith("--")]
    parse_flags(train.define_flags, flags)


@pytest.mark.parametrize("script", ["slurm", "gke_jobset", "tpu_vm", "serve_gke"])
def test_a_script_without_arguments_says_what_it_needs(script):
    finished = launch(script, status=2)
    assert finished.stderr.startswith(f"launch/{script}: ")
    assert not finished.stdout


@pytest.mark.parametrize("finished", [True, False])
def test_the_slurm_job_runs_train_and_requeues_itself_until_it_is_finished(tmp_path, finished):
    """The very batch script, with srun running its command and a train that says how it ended."""
    said = '{"finished": true}' if finished else '{"finished": false}'
    executable(tmp_path / "srun", 'while [[ $1 == --* ]]; do shift; done; "$@"')
    executable(tmp_path / "scontrol", f'echo "$@" >{tmp_path}/requeued')
    kept = f"printf '%s\\n' \"$@\" >{tmp_path}/arguments; env >{tmp_path}/environment"
    executable(tmp_path / "python", f"{kept}; echo '{said}'")
    chosen = {"NODES": "2", "GPUS_PER_NODE": "4", "PYTHON": str(tmp_path / "python")}
    script = dry_run("slurm", *FLAGS, **chosen)
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --signal=TERM@" in script
    job = script.replace(f"cd '{REPOSITORY}'", f"cd '{tmp_path}'")
    assert job != script
    run_program("bash", "-c", job, env=path_with(tmp_path), SLURM_JOB_ID="7")
    assert (tmp_path / "arguments").read_text().splitlines() == ["-m", "clover_jax.train", *FLAGS]
    variables = (tmp_path / "environment").read_text().splitlines()
    assert "JAX_COORDINATOR_ADDRESS=auto" in variables
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3" in variables  # else a process has one GPU of four
    assert (tmp_path / "requeued").exists() != finished


def path_with(folder):
    """Return an environment of nothing but PATH, with a folder before its others."""
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def container(**variables):
    manifest = yaml.safe_load(
        dry_run("gke_jobset", *FLAGS, IMAGE="registry/clover", BUCKET="bucket", **variables)
    )
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"]["containers"][0]


def test_the_jobset_has_a_pod_for_every_host_and_a_hub_token_from_a_secret():
    job, pod = container(HOSTS="2", TOPOLOGY="2x4", HF_SECRET="my-token")
    variables = {one.pop("name"): one for one in pod["env"]}
    secret = {"name": "my-token", "key": "token", "optional": True}
    assert variables["HF_TOKEN"] == {"valueFrom": {"secretKeyRef": secret}}
    assert job["parallelism"] == job["completions"] == 2
    assert job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert pod["args"][1:] == ["/data/runs/clover", "--workdir=/data/runs/clover", *FLAGS]


@pytest.mark.parametrize("finished", [True, False])
def test_a_pod_succeeds_only_when_all_steps_are_done(tmp_path, finished):
    """The pod's very command; a train that was stopped ends with status 0 too."""
    _, pod = container(WORKDIR=str(tmp_path))
    result = f"touch {tmp_path}/result.json" if finished else "true"
    executable(tmp_path / "python", f"printf '%s\\n' \"$@\" >{tmp_path}/arguments; {result}")
    ended = run_program(*pod["command"], *pod["args"], env=path_with(tmp_path), status=None)
    assert (ended.returncode == 0) == finished
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments == ["-m", "clover_jax.train", f"--workdir={tmp_path}", *FLAGS]


@pytest.mark.parametrize("status", [0, 1])
def test_a_pod_of_another_command_ends_as_that_does(tmp_path, status):
    _, pod = container(COMMAND="generate")
    kept = f"printf '%s\\n' \"$@\" >{tmp_path}/arguments"
    executable(tmp_path / "python", f"{kept}; exit {status}")
    run_program(*pod["command"], *pod["args"], env=path_with(tmp_path), status=status)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments == ["-m", "clover_jax.generate", *FLAGS]


def test_a_pod_hands_sigterm_on_and_waits_for_the_checkpoint(tmp_path):
    _, pod = container(WORKDIR=str(tmp_path))
    with started(pod, tmp_path) as (process, _):
        process.terminate()
        assert process.wait(60) != 0
    assert (tmp_path / "ended").exists()


@contextlib.contextmanager
def started(pod, folder):
    """Run a pod's command with a program that waits for SIGTERM as `python`: (process, arguments).

    The program leaves a file `ended` when it has been told.
    """
    (folder / "program.py").write_text(
        "import pathlib, signal, sys, threading; stop = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.set())\n"
        f"pathlib.Path('{folder}/started').write_text('\\n'.join(sys.argv[1:]))\n"
        f"stop.wait(); pathlib.Path('{folder}/ended').touch()"
    )
    os.mkfifo(folder / "started")
    executable(folder / "python", f'exec {sys.executable} {folder}/program.py "$@"')
    command = [*pod["command"], *pod["args"]]
    with subprocess.Popen(command, env=path_with(folder)) as process:
        # A pipe: waits until the child listens.
        yield process, (folder / "started").read_text().splitlines()


def test_the_tpu_vm_steps_print_gcloud_commands():
    assert "--accelerator-type=v5litepod-16" in dry_run("tpu_vm", "create")
    assert "--spot" not in dry_run("tpu_vm", "create", SPOT="")
    assert "scp" in dry_run("tpu_vm", "install")
    train = dry_run("tpu_vm", "train", *FLAGS)
    assert "--worker=all" in train
    # What reaches the hosts, unquoted once as their shells will do it.
    words = run_program("bash", "-c", f"printf '%s\\0' {train}").stdout.split("\0")
    (command,) = [word for word in words if word.startswith("--command=")]
    shell = command.removeprefix("--command=").replace(".venv/bin/python", "printf '%s\\n'")
    shell = shell.replace("cd clover && JAX_COORDINATOR_ADDRESS=auto ", "")
    said = run_program("bash", "-c", shell).stdout
    assert said.splitlines() == ["-m", "clover_jax.train", *FLAGS]


SERVED = ("--base=/data/a base", "--draft=lookup")


def deployment(**variables):
    printed = dry_run("serve_gke", *SERVED, IMAGE="registry/clover", BUCKET="b", **variables)
    deployed, service = yaml.safe_load_all(printed)
    return deployed["spec"], service["spec"]


def test_a_replica_is_asked_only_when_it_answers_and_may_end_what_it_began():
    spec, service = deployment(REPLICAS="3", REQUEST_SECONDS="60")
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    assert (spec["replicas"], pod["terminationGracePeriodSeconds"]) == (3, 90)
    assert spec["selector"]["matchLabels"] == service["selector"]
    assert spec["template"]["metadata"]["labels"] == service["selector"]
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert "httpGet" not in server["livenessProbe"]


def test_a_served_pod_has_flags_that_parse_a_key_and_hands_sigterm_on(tmp_path):
    (server,) = deployment(REQUEST_SECONDS="60")[0]["template"]["spec"]["containers"]
    with started(server, tmp_path) as (process, arguments):
        process.terminate()
        process.wait(30)
    assert (tmp_path / "ended").exists()

    assert arguments[:2] == ["-m", "clover_jax.serve"]
    flags = parse_flags(serve.define_flags, arguments[2:])
    assert (flags.host, flags.port, flags.request_timeout) == ("0.0.0.0", 8000, 60)
    assert (flags.base, flags.draft) == ("/data/a base", "lookup")
    (keys,) = (one for one in server["volumeMounts"] if one["name"] == "keys")
    assert flags.api_key_file.startswith(keys["mountPath"])


@pytest.fixture
def bare_machine(tmp_path):
    """A checkout with launch/, and an environment whose Python prints what it is asked to run."""
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    (tmp_path / "setup.cfg").write_text("")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    executable(tmp_path / ".venv/bin/python", 'echo "$@"')
    return tmp_path


def accelerator(machine, *arguments, path="/usr/bin:/bin", status=0):
    script = machine / "launch" / "accelerator"
    return run_program("bash", script, *arguments, env={"PATH": path}, status=status)


def test_the_accelerator_script_measures_for_what_the_installation_left_of_its_time(bare_machine):
    executable(bare_machine / "nvidia-smi", "")
    there = f"{bare_machine}:/usr/bin:/bin"
    asked = accelerator(bare_machine, "--minutes=2", "--output=a folder", path=there).stdout
    assert "pip install --quiet --quiet --editable .[cuda,test]" in asked
    seconds = re.search(r"-m experiments.accelerator --seconds=(\d+) --output=a folder\n", asked)
    assert int(seconds[1]) <= 120

    rehearsed = accelerator(bare_machine, "--rehearse").stdout
    assert "--editable .[test]" in rehearsed
    assert rehearsed.count("--rehearse") == 1


def test_the_accelerator_script_says_what_is_wrong(bare_machine):
    mistakes = {"--minutes=ten": "--minutes=ten must be", "--fast": "unknown argument --fast"}
    for argument, reason in mistakes.items():
        assert reason in accelerator(bare_machine, argument, status=2).stderr


def test_the_image_is_made_of_files_and_extras_that_there_are():
    text = (REPOSITORY / "launch" / "Dockerfile").read_text()
    options = configparser.ConfigParser(interpolation=None)
    options.read(REPOSITORY / "setup.cfg")
    chosen = re.findall(r"EXTRAS=([\w,]+)", text)
    assert len(chosen) == 2  # for a TPU, and for a GPU
    for extra in ",".join(chosen).split(","):
        assert extra in options["options.extras_require"]

    # Each line is copied by its own name to where the checkout has it.
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    for *sources, target in copied:
        assert target in ("./", *sources)
        for source in sources:
            assert (REPOSITORY / source).exists()
    last_step = text.splitlines()[-1].removeprefix("RUN ")
    assert last_step in options["options.entry_points"]["console_scripts"]
