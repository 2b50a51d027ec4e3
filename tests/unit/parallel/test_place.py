"""A process finds its place in what torchrun, srun or mpirun say, and starts nothing of its own."""

from __future__ import annotations

import itertools

import pytest

from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.launch.schedulers.agent import rendezvous_arguments
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError
from yolofleet.support.place import Place, first_node, is_first, place_from_environment
from yolofleet.training.parallel.process import prepare_process

# of `srun -N2 --ntasks-per-node=2` under SLURM 22.05
SRUN = dict(
    SLURM_JOB_ID="41",
    SLURM_STEP_ID="1",
    SLURM_PROCID="2",
    SLURM_NTASKS="4",
    SLURM_STEP_NUM_TASKS="3",
    SLURM_LOCALID="0",
    SLURM_NODEID="1",
    SLURM_STEP_NODELIST="gpu[07-08]",
    SLURM_JOB_NODELIST="gpu[05-08]",
    SLURM_STEP_TASKS_PER_NODE="2,1",
)
# of `mpirun -np 2` of Open MPI 4.1
MPIRUN = dict(
    OMPI_COMM_WORLD_RANK="1",
    OMPI_COMM_WORLD_SIZE="2",
    OMPI_COMM_WORLD_LOCAL_RANK="1",
    OMPI_COMM_WORLD_LOCAL_SIZE="2",
    OMPI_MCA_orte_hnp_uri="1945174016.0;tcp://192.0.2.2:34079;tcp6://[fd00::2]:55615",
    OMPI_MCA_orte_local_daemon_uri="1945174016.0;tcp://192.0.2.2:34079;tcp6://[fd00::2]:55615",
    PMIX_NAMESPACE="1945174017",
    PMIX_RANK="1",
)
TWO_MACHINES = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
TORCHRUN = dict(
    RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1"
)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_a_task_of_srun() -> None:
    # job 41, step 1: 15000 + 41 + 1009
    assert place_from_environment(SRUN) == Place(2, 3, 0, 1, "srun", "gpu07", 16050)
    first_node = SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert place_from_environment(first_node) == Place(1, 3, 1, 2, "srun", "gpu07", 16050)


def test_an_address_and_a_port_that_are_given_win() -> None:
    place = place_from_environment(SRUN | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "2345"})
    assert (place.address, place.port) == ("10.0.0.9", 2345)
    assert place_from_environment(MPIRUN | {"MASTER_PORT": "2345"}).port == 2345


def test_the_script_of_sbatch_and_one_task_are_alone() -> None:
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert place_from_environment(script | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}) == Place()
    assert place_from_environment(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Place()


@pytest.mark.parametrize(
    "name", ["SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"]
)
def test_a_missing_piece_of_srun_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"SLURM_.* is missing"):
        place_from_environment(without(SRUN, name))


def test_nodes_of_srun_are_needed_unless_the_address_is_given() -> None:
    bare = without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is missing"):
        place_from_environment(bare)
    assert place_from_environment(bare | {"MASTER_ADDR": "a"}).address == "a"


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_PROCID": "3"},  # of 3
        {"SLURM_PROCID": "x"},
        {"SLURM_STEP_NUM_TASKS": "-3"},
        {"SLURM_LOCALID": "1"},  # of 1
        {"SLURM_NODEID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
        {"SLURM_STEP_NODELIST": "gpu[07"},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "http"},
    ],
)
def test_nonsense_of_srun_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        place_from_environment(SRUN | wrong)


@pytest.mark.parametrize(
    "launcher",
    [
        SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
    ],
    ids=["srun", "mpirun", "torchrun"],
)  # fmt: skip
def test_a_process_that_sees_only_its_own_gpu(launcher: dict[str, str]) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        assert place_from_environment(launcher | {name: "1"}).only_device == "1"
        assert place_from_environment(launcher | {name: "GPU-5a"}).only_device == "GPU-5a"
        assert place_from_environment(launcher | {name: "0,1"}).only_device == ""
    assert place_from_environment(launcher).only_device == ""
    ours = {"TORCHELASTIC_RUN_ID": "yolofleet", "CUDA_VISIBLE_DEVICES": "1"}
    assert place_from_environment(launcher | ours).only_device == "", "all workers see it"
    assert place_from_environment({"CUDA_VISIBLE_DEVICES": "1"}).only_device == "", "alone it uses --device"


@pytest.mark.parametrize(
    ("short", "first"),
    [
        ("n1", "n1"),
        ("a,b-2.x,c", "a"),
        ("n[1-3]", "n1"),
        ("n[08-11,2],x", "n08"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("n[7,9-12]-ib,m7", "n7-ib"),
        ("n[1-99999999]", "n1"),
    ],
)
def test_the_first_of_a_short_list_of_nodes(short: str, first: str) -> None:
    assert first_node(short) == first


@pytest.mark.parametrize(
    "short", ["", ",", "a,", "n[", "n[]", "n[1", "n1]", "n[a-b]", "n[1-]", "n[[1]]", "a b", "a;b", "n1\n"]
)
def test_what_is_no_list_of_nodes_is_refused(short: str) -> None:
    with pytest.raises(ConfigError):
        first_node(short)


def test_rank_0_of_a_huge_list_is_found_at_once() -> None:
    assert place_from_environment(SRUN | {"SLURM_STEP_NODELIST": "n[1-99999999]"}).address == "n1"


def test_a_process_of_mpirun() -> None:
    place = place_from_environment(MPIRUN)
    assert place == Place(1, 2, 1, 2, "mpirun (Open MPI)", "127.0.0.1", place.port)
    assert 15000 <= place.port < 30000
    assert place_from_environment(MPIRUN | {"PMIX_NAMESPACE": "77"}).port != place.port
    assert place_from_environment(HYDRA).source == "mpirun (Hydra)"


def test_mpirun_on_two_machines() -> None:
    assert place_from_environment(TWO_MACHINES).address == "192.0.2.2"
    assert place_from_environment(TWO_MACHINES | {"MASTER_ADDR": "a"}).address == "a"
    elsewhere = TWO_MACHINES | {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_orte_local_daemon_uri": "1.1;tcp://10.0.0.3:1",
    }
    with pytest.raises(ConfigError, match=r"rank 0 is not on the machine of mpirun[\s\S]*MASTER_ADDR=HOST"):
        place_from_environment(elsewhere)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        place_from_environment(HYDRA | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})


def test_the_innermost_launcher_wins() -> None:
    orted = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}  # mpirun started its daemons with srun
    assert place_from_environment(SRUN | orted | MPIRUN).source == "mpirun (Open MPI)"
    assert place_from_environment(SRUN | {"PMI_RANK": "2", "PMI_SIZE": "3"}).source == "srun"  # --mpi=pmi2
    assert place_from_environment(SRUN | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}).source == "torchrun"
    assert place_from_environment(SRUN | {"RANK": "0"}).source == "srun"  # stray


def test_variables_that_contradict_the_launcher_are_named() -> None:
    with pytest.raises(ConfigError, match=r"RANK=3 WORLD_SIZE=4, but srun says rank 2 of 3"):
        place_from_environment(SRUN | TORCHRUN)
    same = SRUN | TORCHRUN | {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert place_from_environment(same).source == "torchrun"


@pytest.mark.parametrize("environment", [{"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMIX_RANK": "1"}])
def test_a_rank_of_which_too_little_is_known_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="one of several processes"):
        place_from_environment(environment)
    assert place_from_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}) == Place()


POD = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
JSRUN = dict(JSM_NAMESPACE_RANK="1", JSM_NAMESPACE_SIZE="2")
FLUX = dict(FLUX_TASK_RANK="1", FLUX_JOB_SIZE="2")
PET = dict(
    PET_NNODES="2", PET_NODE_RANK="1", PET_NPROC_PER_NODE="1", PET_MASTER_ADDR="a", PET_MASTER_PORT="1"
)
OTHERS = [{"PBS_NODENUM": "1"}, {"LSF_PM_TASKID": "2"}, {"ALPS_APP_PE": "0"}, {"PET_NNODES": "1:3"}]


def test_a_pod_of_a_pytorchjob_takes_part_as_the_only_process_of_its_machine() -> None:
    assert place_from_environment(TORCHRUN) == Place(3, 4, 1, 2, "torchrun", "a", 1)
    assert place_from_environment(POD) == Place(3, 4, 0, 1, "env://", "a", 1)
    assert place_from_environment(POD | {"LOCAL_WORLD_SIZE": "1"}) == Place(3, 4, 0, 1, "env://", "a", 1)
    assert place_from_environment(POD | PET) == Place(3, 4, 0, 1, "env://", "a", 1)
    with pytest.raises(ConfigError, match="LOCAL_RANK is missing"):
        place_from_environment(without(TORCHRUN, "LOCAL_RANK"))


def subsets(environment: dict[str, str]) -> list[dict[str, str]]:
    names = sorted(environment)
    chosen = (itertools.compress(names, bits) for bits in itertools.product((0, 1), repeat=len(names)))
    return [{name: environment[name] for name in some} for some in chosen]


@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, SRUN, TWO_MACHINES, HYDRA, JSRUN, FLUX, PET, *OTHERS],
    ids=[
        "torchrun",
        "srun",
        "Open MPI",
        "Hydra",
        "jsrun",
        "flux",
        "PET",
        "pbsdsh",
        "blaunch",
        "aprun",
        "elastic",
    ],
)
def test_no_process_of_several_trains_the_whole_set_alone_whatever_its_launcher_left_out(
    launcher: dict[str, str],
) -> None:
    """For each subset of the variables: it takes part, or is refused, or has nothing that says that it is one of several."""
    several = {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "PET_NNODES"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"),
        *JSRUN, *FLUX, *(name for one in OTHERS for name in one),
    }  # fmt: skip
    tried = taken = refused = 0
    for some in subsets(launcher):
        tried += 1
        try:
            place = place_from_environment(some)
        except ConfigError as problem:
            refused += 1
            assert problem.hint and ("one of several" in problem.what or "MASTER_ADDR" in problem.hint), some
            continue
        if place.size > 1:
            taken += 1
            continue
        says = several.intersection(some)
        # one variable of torchrun's is often left in a shell: the preflight warns
        assert not says or set(some) in ({"RANK"}, {"LOCAL_RANK"}, {"WORLD_SIZE"}), some
    assert tried == 2 ** len(launcher) and refused and tried > taken + refused
    assert taken or launcher in (JSRUN, FLUX, PET, *OTHERS)


@pytest.mark.parametrize(
    "alone",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"RANK": "-1", "LOCAL_RANK": "-1", "WORLD_SIZE": "-1"},
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"PBS_NODENUM": "0", "PBS_JOBID": "7"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"},
        {"LSB_JOBID": "5", "LSB_DJOB_NUMPROC": "4"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    ],
)
def test_a_process_whose_launcher_started_one_is_alone(alone: dict[str, str]) -> None:
    assert place_from_environment(alone) == Place()


def test_exported_variables_do_not_disturb_srun() -> None:
    """As many job scripts export them for other trainers."""
    exported = {"WORLD_SIZE": "3", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    assert place_from_environment(SRUN | exported).source == "srun"
    assert place_from_environment(SRUN | exported | {"RANK": "2"}).source == "srun"


def test_a_pod_with_several_gpus_is_asked_which_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    for spec in ("auto", "0,1"):
        with pytest.raises(ConfigError, match="which of the 2 devices here rank 3 uses"):
            prepare_process(TrainConfig(device=spec), place_from_environment(POD))


def test_only_the_first_process_speaks() -> None:
    assert is_first({}) and is_first({"RANK": "0", "SLURM_PROCID": "1"})
    assert not is_first(SRUN) and not is_first(MPIRUN) and not is_first({"RANK": "4", "SLURM_PROCID": "0"})


def test_agents_meet_where_the_scheduler_says() -> None:
    two = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    said = ["--nnodes=2", "--node-rank=1", "--master-addr=gpu07", "--master-port=16050"]
    assert rendezvous_arguments(two, ["--nproc-per-node=4"]) == said
    assert rendezvous_arguments({}, [])[0] == "--nnodes=1"
    assert rendezvous_arguments(two, ["--nnodes=3", "--node-rank=0", "--master-addr=a"]) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is not a port"),
        ("MASTER_PORT", "0", "MASTER_PORT=0 is not a port"),
        ("RANK", "4", "rank 4 of 4"),
        ("RANK", "x", "RANK"),
        ("WORLD_SIZE", "999999999999", r"rank 3 of 999999999999 \(at most 100,000\)"),
    ],
)
def test_numbers_of_torchrun_that_cannot_be_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_from_environment(TORCHRUN | {name: value})
