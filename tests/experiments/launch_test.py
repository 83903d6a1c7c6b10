"""Several processes of this machine, and scripts for others, run with stand-ins of their tools."""

import os
import shlex
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import time

import pytest
import yaml

from experiments import launch
from tests.support import ROOT
from tests.support.commands import run_here

TRAIN = ["train", "--config=smoke", "--workdir=/shared/it's one"]
ASKED = ["fp8jax", *TRAIN]


def render(target, mesh, *flags):
    done = run_here(
        "launch", "render", f"--target={target}", f"--mesh={mesh}", *flags, "--", *TRAIN
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(folder, name, script):
    """A stand-in for a program; it notes its arguments, a line each, in a file of its process."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {folder}/{name}.$$.said\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def said(folder, name):
    """The arguments of each call of a stand-in, the oldest first."""
    calls = sorted(folder.glob(f"{name}.*.said"), key=lambda call: call.stat().st_mtime_ns)
    return [call.read_text().splitlines() for call in calls]


def run_script(script, folder, **variables):
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", script], env=os.environ | path | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("status, again", [(0, []), (1, []), (75, [["requeue", "7"]])])
def test_a_slurm_job_that_was_asked_to_stop_is_requeued(tmp_path, status, again):
    script = render("slurm", "gpus_64", "--name=mine")
    tool(tmp_path, "srun", f"exit {status}")
    tool(tmp_path, "scontrol", "")
    done = run_script(script, tmp_path, SLURM_JOB_ID="7")
    assert (done.returncode, done.stderr, said(tmp_path, "scontrol")) == (status, "", again)
    (call,) = said(tmp_path, "srun")
    assert call[call.index("fp8jax") :] == [*ASKED, "--config.mesh=gpus_64"]
    for option in ("job-name=mine", "nodes=8", "ntasks-per-node=8", "gpus-per-node=8", "requeue"):
        assert f"#SBATCH --{option}\n" in script


def test_a_tpu_runs_again_as_long_as_it_was_asked_to_stop(tmp_path):
    script = render("tpu-vm", "tpu_v5p_256")
    tool(
        tmp_path,
        "gcloud",
        f'[ "$(cat {tmp_path}/gcloud.*.said | grep -c worker=all)" = 3 ] || exit 75',
    )
    done = run_script(script, tmp_path, TPU_NAME="name", ZONE="zone")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(calls := said(tmp_path, "gcloud")) == 3
    (line,) = (flag.removeprefix("--command=") for flag in calls[0] if "--command=" in flag)
    assert shlex.split(line) == [*ASKED, "--config.mesh=tpu_v5p_256", "--cluster=tpu"]
    assert "set it to the name of a v5p-256" in run_script(script, tmp_path).stderr


@pytest.mark.parametrize(
    "mesh, pods, limits",
    [("gpus_64", 8, {"nvidia.com/gpu": 8}), ("tpu_v5p_256", 32, {"google.com/tpu": 4})],
)
def test_a_jobset_has_a_pod_for_each_node(mesh, pods, limits):
    made = yaml.safe_load(render("jobset", mesh, "--name=mine", "--image=here/fp8jax:1"))
    (workers,) = made["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (pods, pods, 0)
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": limits} and container["image"] == "here/fp8jax:1"
    run = container["args"][0].replace("exec fp8jax", "printf '%s\\n' fp8jax")
    done = run_script(run, ROOT, JOB_COMPLETION_INDEX="3")
    assert done.stdout.splitlines() == [
        *ASKED,
        f"--config.mesh={mesh}",
        "--coordinator=mine-workers-0-0.mine:8476",
        f"--num_processes={pods}",
        "--process_id=3",
    ]
    # A run that was asked to stop fails its job for a reason that does not count.
    stopped, disrupted = job["podFailurePolicy"]["rules"]
    assert stopped["onExitCodes"]["values"] == [launch.RUN_AGAIN]
    assert stopped["action"] == disrupted["action"] == "FailJob"
    (rule,) = made["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.extended
@pytest.mark.parametrize("target, mesh", [("slurm", "gpus_8"), ("tpu-vm", "tpu_v5p_256")])
def test_shellcheck_finds_nothing(target, mesh, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(render(target, mesh))
    shellcheck = os.path.join(sysconfig.get_path("scripts"), "shellcheck")  # of this environment
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "given, message",
    [
        (["render", "--target=slurm", "--mesh=gpus"], "no mesh 'gpus': one of gpus_4"),
        (["render", "--target=slurm", "--mesh=tpu_v5p_256"], "slurm is for gpu; tpu_v5p_256 is"),
        (["render", "--target=tpu-vm", "--mesh=gpus_8"], "tpu-vm is for tpu; gpus_8 is of gpus"),
        (["render", "--mesh=gpus_8"], "render needs --target"),
        (["local", "--mesh=gpus_8"], "--mesh is not for local"),
        (["remote"], "the first argument must be one of local, render"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    done = run_here("launch", *given, "--", *TRAIN)
    assert done.returncode == 1 and message in done.stderr
    for wrong in ([], ["--"], ["--", "fly"], ["--", "generate"]):
        assert "after -- comes a command" in run_here("launch", "local", *wrong).stderr


# Here ---------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A function that has a shell script run in place of Python, as process number $I."""

    def make(script):
        tool(
            tmp_path,
            "python",
            f"for a; do case $a in --process_id=*) I=${{a#*=}};; esac; done\n{script}",
        )
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return make


def test_processes_share_gpus_or_have_virtual_devices(tmp_path, stand_in, monkeypatch, capfd):
    stand_in('echo "$I has $CUDA_VISIBLE_DEVICES $JAX_PLATFORMS"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,6,7")
    monkeypatch.setenv("JAX_PLATFORMS", "any")
    assert launch.run_local(TRAIN, 2, None) == 0
    assert capfd.readouterr().out == "0 has 3,4 any\n"
    calls = said(tmp_path, "python")
    assert sorted(call[-1] for call in calls) == ["--process_id=0", "--process_id=1"]
    assert all(call[:2] == ["-m", "experiments.train"] and call[2:4] == TRAIN[1:] for call in calls)
    with pytest.raises(ValueError, match="4 GPUs cannot be shared out to --processes=3"):
        launch.run_local(TRAIN, 3, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # none, on purpose
    assert launch.run_local(TRAIN, 2, None) == 0
    assert capfd.readouterr().out == "0 has  any\n"
    stand_in('echo "$I has $JAX_PLATFORMS ${XLA_FLAGS##* }" 1>&2')
    assert launch.run_local(TRAIN, 2, 4) == 0
    lines = sorted(capfd.readouterr().err.splitlines())
    device = "cpu --xla_force_host_platform_device_count=4"
    assert lines == [f"0 has {device}", f"[1] 1 has {device}"]


@pytest.mark.parametrize(
    "script, status",
    [
        ("exit 0", 0),
        ("exit $((75 * I))", 75),
        ("exit 75", 75),
        ("exit $((3 * I))", 3),
        ("[ $I = 1 ] && exit 4; sleep 0.4; exit 75", 4),
        ("kill -9 $$", 137),
        ("[ $I = 0 ] && exec sleep 60; exit 5", 5),  # the other one does not leave
    ],
)
def test_the_status_is_that_of_the_first_that_failed(stand_in, monkeypatch, script, status):
    monkeypatch.setattr(launch, "LEAVE_S", 0.5)
    stand_in(script)
    assert launch.run_local(TRAIN, 2, 1) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_go_to_all_and_who_takes_them_ends_by_itself(stand_in, capfd, number):
    name = number.name.removeprefix("SIG")
    stand_in(f"trap 'sleep 0.3; exit 75' {name}; echo ready; while :; do sleep 0.05; done")
    output = []

    def ask():
        while output.count("ready") < 2:
            output.extend(line[-5:] for line in "".join(capfd.readouterr()).splitlines())
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    assert launch.run_local(TRAIN, 2, 1) == 75
    asking.join()
