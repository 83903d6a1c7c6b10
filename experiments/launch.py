"""Starts several processes here, or writes a script that starts them elsewhere.

    local     --processes=4 -- train --config=smoke --workdir=runs/smoke
    render    --target=slurm --mesh=gpus_64 -- train --config=llama3_8b --workdir=/shared/runs/8b

What follows `--` is a command with its flags, as after `fp8jax`. `render` prints a script for
SLURM, a JobSet for Kubernetes, or a script for TPU VMs; docs/pods.md says how each is used.
"""

import glob
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.config_keys import RUN_KEYS
from experiments.subcommands import Command, check_flags, choose, show_help
from fp8jax.lm.cli import command
from fp8jax.lm.cli.config_flag import read_mesh
from fp8jax.lm.cli.main import SEVERAL
from fp8jax.lm.training.channel import RUN_AGAIN

LEAVE_S = 60.0  # for the other processes, once one has failed

_PROCESSES = flags.DEFINE_integer("processes", 2, "local: how many processes.", 1)
_DEVICES = flags.DEFINE_integer("devices", None, "local: virtual CPU devices of each.", 1)
_TARGET = flags.DEFINE_enum("target", None, ("slurm", "jobset", "tpu-vm"), "render: for what.")
_MESH = flags.DEFINE_string("mesh", None, "render: a file of configs/meshes/, by name.")
_NAME = flags.DEFINE_string("name", "fp8jax", "render: the job's name.")
_IMAGE = flags.DEFINE_string("image", "fp8jax:latest", "render: the container's image (jobset).")

_SUBCOMMANDS = (
    Command(
        name="local",
        about="Starts processes here that train together. After -- comes the command.",
        takes=("processes", "devices"),
    ),
    Command(
        name="render",
        about="Prints a script that starts a command elsewhere. After -- comes the command.",
        needs=("target", "mesh"),
        takes=("name", "image"),
    ),
)


# Here ---------------------------------------------------------------------------------------------


def run_local(arguments: Sequence[str], count: int, devices: int | None) -> int:
    """Runs `fp8jax ARGUMENTS` in `count` processes; returns the status of all.

    GPUs are shared out. SIGTERM, Ctrl-C and SIGHUP go on to all. If one fails, the others have
    `LEAVE_S` to leave.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children: list[subprocess.Popen] = []
    before = {
        number: signal.signal(number, lambda number, _: _send(children, number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    for index in range(count):
        given = [f"--coordinator=localhost:{port}", f"--num_processes={count}"]
        start = [sys.executable, "-m", f"experiments.{arguments[0]}", *arguments[1:]]
        quiet = None if index == 0 else subprocess.PIPE
        children.append(
            subprocess.Popen(
                [*start, *given, f"--process_id={index}"],
                env=_environment(index, count, devices),
                stdout=quiet,
                stderr=quiet and subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches them once, by way of us
            )
        )
    readers = [
        threading.Thread(target=_label, args=(index, child))
        for index, child in enumerate(children)
        if child.stdout
    ]
    for reader in readers:
        reader.start()
    try:
        return _wait(children)
    finally:
        _send(children, signal.SIGKILL)
        for reader in readers:
            reader.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(index: int, count: int, devices: int | None) -> dict[str, str]:
    """Returns the environment of a process: its share of the GPUs, or its virtual devices."""
    environment = dict(os.environ)
    if devices is not None:
        environment["JAX_PLATFORMS"] = "cpu"
        given = environment["XLA_FLAGS"] if "XLA_FLAGS" in environment else ""
        own = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = f"{given} {own}".strip()
        return environment
    if "CUDA_VISIBLE_DEVICES" in environment:
        gpus = [gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    else:
        gpus = [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    if gpus:
        if len(gpus) % count:
            raise ValueError(f"{len(gpus)} GPUs cannot be shared out to --processes={count}")
        each = len(gpus) // count
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * each : (index + 1) * each])
    return environment


def _send(children: Sequence[subprocess.Popen], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _label(index: int, child: subprocess.Popen) -> None:
    """Prints what another process than the first says, with its number."""
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            print(f"[{index}] {text}", file=sys.stderr, flush=True)


def _wait(children: Sequence[subprocess.Popen]) -> int:
    """Returns the status of the first that failed, else `RUN_AGAIN` if one has it, else 0."""
    failed, deadline = 0, None
    while None in (states := [child.poll() for child in children]):
        bad = [status for status in states if status]
        if bad and deadline is None:
            failed = next((status for status in bad if status != RUN_AGAIN), 0)
            deadline = time.monotonic() + LEAVE_S
        if deadline is not None and time.monotonic() > deadline:
            _send(children, signal.SIGKILL)
        time.sleep(0.05)
    ended = [child.returncode for child in children]
    failed = failed or next((status for status in ended if status not in (0, RUN_AGAIN)), 0)
    if failed < 0:  # by a signal, which shells say so
        return 128 - failed
    return failed or (RUN_AGAIN if RUN_AGAIN in ended else 0)


# Elsewhere ----------------------------------------------------------------------------------------


def render(target: str, mesh: str, name: str, image: str, arguments: Sequence[str]) -> str:
    """Returns a script or a JobSet that runs `fp8jax ARGUMENTS` on a machine of that mesh.

    Raises:
      ValueError: there is no such mesh, or the target does not have its devices.
    """
    machine = read_mesh(mesh)
    kinds = {"slurm": ("gpu",), "jobset": ("gpu", "tpu"), "tpu-vm": ("tpu",)}[target]
    if machine["device"] not in kinds:
        raise ValueError(
            f"--target={target} is for {' and '.join(kinds)}; {mesh} is of {machine['device']}s"
        )
    line = shlex.join(["fp8jax", *arguments, f"--config.mesh={mesh}"])
    about = (
        f"{mesh} ({machine['label']}): {machine['nodes']} x {machine['devices_per_node']} "
        f"{machine['device'].upper()}s. Made by experiments.launch; see docs/pods.md."
    )
    return {"slurm": _slurm, "jobset": _jobset, "tpu-vm": _tpu_vm}[target](
        machine, about, line, name, image
    )


def _slurm(machine: Mapping[str, Any], about: str, line: str, name: str, image: str) -> str:
    each = machine["devices_per_node"]
    return f"""#!/bin/bash
# {about}
#SBATCH --job-name={name}
#SBATCH --nodes={machine["nodes"]}
#SBATCH --ntasks-per-node={each}
#SBATCH --gpus-per-node={each}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -uo pipefail

# Each task is a process with one GPU, and finds the others by the variables of srun. After the
# first has left, the others have a minute.
status=0
srun --label --kill-on-bad-exit=0 --wait=60 \\
  {line} || status=$?

# The run was asked to stop, has saved, and goes on from there when it is run again.
if [ "$status" -eq {RUN_AGAIN} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


_JOBSET = """# {about}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: 3
    rules:
    # A pod that was asked to stop has saved: the run goes on, however often.
    - name: goes-on
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: workers
    replicas: 1
    template:
      spec:
        parallelism: {nodes}
        completions: {nodes}
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: fp8jax
              operator: In
              values: [{run_again}]
          - action: FailJob
            onPodConditions:
            - type: DisruptionTarget
              status: "True"
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 60{selector}
            containers:
            - name: fp8jax
              image: {image}
              command: [bash, -c]
              args:
              - {command}
              ports:
              - containerPort: 8476
              resources:
                limits:
                  {resource}: {each}
              volumeMounts:
              - name: shared
                mountPath: /shared
              - name: memory
                mountPath: /dev/shm
            volumes:
            # Workdir and cache_dir lie here: a file system that all pods see.
            - name: shared
              persistentVolumeClaim:
                claimName: shared
            - name: memory
              emptyDir:
                medium: Memory
"""


def _jobset(machine: Mapping[str, Any], about: str, line: str, name: str, image: str) -> str:
    nodes, each = machine["nodes"], machine["devices_per_node"]
    flags_of_pod = (
        f"--coordinator={name}-workers-0-0.{name}:8476 --num_processes={nodes} "
        '--process_id="$JOB_COMPLETION_INDEX"'
    )
    resource = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}[machine["device"]]
    selector = ""
    if machine["device"] == "tpu":
        kind = machine["accelerator"].partition("-")[0]
        selector = f"""
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-{kind}-slice
              cloud.google.com/gke-tpu-topology: {machine["topology"]}"""
    return _JOBSET.format(
        about=about,
        name=name,
        nodes=nodes,
        run_again=RUN_AGAIN,
        selector=selector,
        image=image,
        command=json.dumps(f"exec {line} {flags_of_pod}"),
        resource=resource,
        each=each,
    )


def _tpu_vm(machine: Mapping[str, Any], about: str, line: str, name: str, image: str) -> str:
    return f"""#!/bin/bash
# {about}
# Workdir and cache_dir must lie in a file system that all hosts mount.
set -uo pipefail
: "${{TPU_NAME:?set it to the name of a {machine["accelerator"]}}}"
: "${{ZONE:?set it to the zone of the TPU}}"

status={RUN_AGAIN}
# A run that was asked to stop has saved, and goes on.
while [ "$status" -eq {RUN_AGAIN} ]; do
  status=0
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all \\
    --command={shlex.quote(f"{line} --cluster=tpu")} || status=$?
done
exit "$status"
"""


def main(arguments: Sequence[str]) -> None:
    chosen = choose(_SUBCOMMANDS, arguments[:1])
    check_flags(chosen, _SUBCOMMANDS)
    # As they were given: absl's parser has dropped `--`, and names of configs have become files.
    given = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if not given or given[0] not in SEVERAL:
        raise app.UsageError(
            f"after -- comes a command that may run in several processes: {', '.join(SEVERAL)}"
        )
    if chosen.name == "local":
        sys.exit(run_local(given, _PROCESSES.value, _DEVICES.value))
    target, mesh = _TARGET.value, _MESH.value
    assert target is not None and mesh is not None  # `check_flags` has seen to it
    print(render(target, mesh, _NAME.value, _IMAGE.value, given), end="")


if __name__ == "__main__":
    show_help(_SUBCOMMANDS, "python -m experiments.launch")
    command.run(main, config=RUN_KEYS)
