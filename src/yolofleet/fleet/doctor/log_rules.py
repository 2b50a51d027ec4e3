"""What lines of logs mean: the table behind ``yolofleet doctor --log``.

A pattern is text in lower case; ``*`` stands for anything within the line, ``^`` and ``$`` for its ends. The first
rule that fits a line gets it, so special cases stand above general ones. To add a rule, add a row, a real excerpt
to the tests, and a line to docs/doctor-logs.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolofleet.fleet.doctor.findings import Level

# Which of several findings explains the others; the lowest number comes first.
MACHINE = 0  # hardware, driver, memory, disk
NAMED = 1  # an error that names its cause
ENDED = 2  # a process ended, and how it ended says something
UNNAMED = 3  # an error whose cause is in another line, or in another log
FOLLOWS = 4  # what the others see when one has failed
EXPLAINED = 5  # another finding says what it was


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        code: name of the finding. Rules that share a code make one finding together.
        order: MACHINE .. FOLLOWS.
        unmet: the processes did not find each other; then connections that were refused, not routed or not
            resolved and tried again are its cause. Without such an end, a later attempt succeeded.
    """

    code: str
    patterns: tuple[str, ...]
    why: str
    fix: str = ""
    level: Level = "fault"
    order: int = NAMED
    unmet: bool = False


# The processes have met: attempts to connect that failed before were tried again and worked.
MET = ("init complete", "connected all rings", "connected all trees", "rendezvous complete")

NCCL_ERROR = "nccl-error"

_SILENCE = "Nobody answered in time: a firewall that drops, a wrong address or card, or the first machine was not started. (Newer versions of torch say the same of a port that refused all the while.)"
_LOOK_UP = "getent hosts NAME   # must print an address that the other machines reach; else an entry in /etc/hosts, or use the address itself"
_CARDS = "ip -br addr   # then, on every machine, export NCCL_SOCKET_IFNAME=CARD GLOO_SOCKET_IFNAME=CARD"
_SHM = "docker run --ipc=host ... (or --shm-size 16g; Kubernetes: an emptyDir of medium Memory on /dev/shm); else fewer --workers; df -h /dev/shm"
_LOGS = "yolofleet doctor --log RUN   # the logs of all ranks; torchrun: --log-dir logs --tee 3"
_FIREWALL = "sudo firewall-cmd --zone=trusted --add-source=SUBNET   # or: sudo ufw allow from SUBNET; all TCP ports between the machines, not only the rendezvous port"

HARMLESS = (
    Rule(
        "no-destroy",
        ("destroy_process_group() was not called", "process group has not been destroyed"),
        "A reminder to programs; the run had ended by then.",
        level="note",
    ),
    Rule(
        "omp-threads",
        ("setting omp_num_threads",),
        "torchrun limits CPU threads to 1 per process unless told otherwise; yolofleet sets its own number.",
        "--threads N",
        level="note",
    ),
    Rule(
        "barrier-device",
        ("devices used by this process are currently unknown", "no device id is provided", "guessing device id"),
        "Advice to programs; matters only where rank and GPU number differ.",
        level="note",
    ),
    Rule(
        "nccl-plugin",
        ("net/plugin*cannot open shared object", "net/plugin*no plugin found", "failed to find ncclnetplugin", "failed to find nccl"),
        "NCCL looked for an optional network plugin and goes on without one.",
        level="note",
    ),
    Rule(
        "no-infiniband",
        ("net/ib : no device found",),
        "This machine has no InfiniBand card that NCCL can use; it takes TCP.",
        level="note",
    ),
    Rule(
        "nccl-socket",
        ("net/socket : using",),
        "NCCL talks over TCP on the card named there. Is it the one you meant?",
        _CARDS,
        level="note",
    ),
    Rule(
        "ipv6-absent",
        ("(errno: 97 -", "gai error: -97", "[localhost]*cannot assign requested address", "gai error: -9 -"),
        "There is no IPv6 here; IPv4 is tried next.",
        level="note",
    ),
    Rule(
        "reverse-name",
        ("hostname of the client socket cannot be retrieved",),
        "The address has no name; only messages are less readable.",
        level="note",
    ),
    Rule(
        "exit-barrier",
        ("error waiting on exit barrier",),
        "torchrun's farewell when machines end at different moments.",
        level="note",
    ),
    Rule(
        "loader-exit",
        ("can only test a child process",),
        "A loader process is tidied up in the wrong order at the end; nothing is lost.",
        level="note",
    ),
    Rule(
        "ddp-advice",
        ("find_unused_parameters=true was specified", "grad strides do not match bucket view strides"),
        "DistributedDataParallel says that it could be faster.",
        level="note",
    ),
    Rule(
        "optional-library",
        ("could not load dynamic library", "failed to load image python extension"),
        "TensorFlow or torchvision goes without a part of its own that training does not need.",
        level="note",
    ),
    Rule(
        "deprecated",
        ("is deprecated", "futurewarning", "deprecationwarning"),
        "Works today, not for ever.",
        level="note",
    ),
)  # fmt: skip

MACHINES = (
    Rule(
        "gpu-program",
        ("nvrm: xid*): 13,", "nvrm: xid*): 31,", "nvrm: xid*): 43,", "nvrm: xid*): 45,", "nvrm: xid*): 69,"),
        "The driver ended a program on the GPU: a wrong memory access in a kernel, or the process was killed.",
        "CUDA_LAUNCH_BLOCKING=1, then the same command: the traceback names the operation",
        order=UNNAMED,
    ),
    Rule(
        "gpu-fault",
        (
            "nvrm: xid (",
            "fallen off the bus",
            "uncorrectable ecc error",
            "uncorrectable nvlink error",
            "unable to determine the device handle",
            "rminitadapter failed",
            "gpu is lost",
            "cuda error: unknown error",
            "hardware stack error",
        ),
        "The GPU, its power or its slot failed. No setting of a run cures that.",
        'sudo dmesg -T | grep -i -e xid -e nvrm; nvidia-smi -q -d ECC,TEMPERATURE   # restart the machine, leave the GPU out with --device',
        order=MACHINE,
    ),
    Rule(
        "driver-mismatch",
        (
            "driver version is insufficient",
            "nvidia driver on your system is too old",
            "driver/library version mismatch",
            "failed to initialize nvml",
            "unsupported display driver / cuda driver combination",
            "cuda unknown error - this may be due to",
            "forward compatibility was attempted on non supported hw",
        ),
        "The NVIDIA driver does not fit this torch, or was updated without a restart.",
        "nvidia-smi   # restart if it fails; else update the driver, or: pip install torch --index-url https://download.pytorch.org/whl/cuXXX for the CUDA version that it shows",
        order=MACHINE,
    ),
    Rule(
        "fabric-manager",
        ("system not yet initialized", "error 802"),
        "GPUs behind NVSwitch need NVIDIA's fabric manager of exactly the driver's version.",
        "sudo systemctl restart nvidia-fabricmanager; systemctl status nvidia-fabricmanager",
        order=MACHINE,
    ),
    Rule(
        "gpu-missing",
        (
            "found no nvidia driver on your system",
            "no cuda gpus are available",
            "no cuda-capable device is detected",
            "torch not compiled with cuda enabled",
            "attempting to deserialize object on a cuda device but torch.cuda.is_available() is false",
        ),
        "This process sees no GPU: no driver, a torch without CUDA, an empty CUDA_VISIBLE_DEVICES, or a container started without --gpus.",
        'nvidia-smi; python -c "import torch; print(torch.version.cuda, torch.cuda.device_count())"; echo $CUDA_VISIBLE_DEVICES',
        order=MACHINE,
    ),
    Rule(
        "gpu-unsupported",
        ("no kernel image is available for execution", "is not compatible with the current pytorch installation"),
        "This torch has no kernels for this generation of GPU.",
        "python -c \"import torch; print(torch.cuda.get_arch_list())\"   # another build: https://pytorch.org/get-started/locally",
        order=MACHINE,
    ),
    Rule(
        "gpu-busy",
        ("cuda-capable device*busy or unavailable",),
        "Another process holds the GPU alone (exclusive mode), or a dead one still does.",
        "nvidia-smi   # end what is listed, or: sudo nvidia-smi -c 0",
        order=MACHINE,
    ),
    Rule(
        "shm-full",
        (
            "posix_fallocate failed*no space left",
            "/dev/shm*no space left",
            "unable to write to file </torch_",
            "failed to extend /dev/shm",
            "error while creating shared memory segment",
            "could not create shared memory",
            "insufficient shared memory",
            "out of shared memory",
            "by signal: bus error",
            "bus error*(core dumped)",
            "^bus error",
            "fatal python error: bus error",
            "signal: bus error",
            "torch_shm_manager*error",
        ),
        "Shared memory (/dev/shm) is full. Loader processes and NCCL need it; a container has 64 MB unless told otherwise.",
        _SHM,
        order=MACHINE,
    ),
    Rule(
        "disk-full",
        ("no space left on device", "disk quota exceeded", "error: enospc", "[errno 28]", "not enough disk space"),
        "The disk, or your share of it, is full.",
        "df -h . /tmp; df -i . /tmp; quota -s",
        order=MACHINE,
    ),
    Rule(
        "disk-fails",
        ("read-only file system", "[errno 5] input/output error", "stale file handle", "transport endpoint is not connected", "i/o error, dev "),
        "The disk or network file system stopped working.",
        "dmesg -T | tail; mount | grep FOLDER; touch FOLDER/x",
        order=MACHINE,
    ),
    Rule(
        "host-memory",
        (
            "out of memory: kill",
            "oom-kill",
            "oom_kill",
            "oomkilled",
            "invoked oom-killer",
            "killed by the cgroup out-of-memory handler",
            "srun: error:*out of memory",
            "outofmemoryerror: task was killed",
            "by signal: killed",
            "std::bad_alloc",
            "can't allocate memory: you tried to allocate",
            "defaultcpuallocator: not enough memory",
            "[errno 12] cannot allocate memory",
            "unable to allocate*for an array",
            "^memoryerror",
        ),
        "The machine, container or job ran out of memory (RAM); the kernel ends the largest process.",
        "dmesg -T | grep -i oom; free -g   # fewer --workers, smaller --prefetch, --cache none; more memory for the job (--mem, docker -m)",
        order=MACHINE,
    ),
)  # fmt: skip

NETWORK = (
    Rule(
        "infiniband-memlock",
        ("ibv_*cannot allocate memory",),
        "InfiniBand needs locked memory, and this process may not lock enough.",
        "ulimit -l unlimited   # docker: --ulimit memlock=-1; SLURM: PropagateResourceLimitsExcept=MEMLOCK",
    ),
    Rule(
        "infiniband",
        ("call to ibv_", "net/ib*got completion", "net/ib*got async event", "net/ib*unable to open", "ibv_*failed", "ib_*local protection error"),
        "The InfiniBand or RoCE card refused: wrong port or GID index, no route between the cards, or a cable.",
        "export NCCL_IB_DISABLE=1   # takes TCP; if that works: ibstat, show_gids, NCCL_IB_HCA, NCCL_IB_GID_INDEX",
    ),
    Rule(
        "no-interface",
        (
            "no socket interface found",
            "unable to find address for",
            "unable to find interface for",
            "failed to look up the ip address for interface",
            "neither af_inet",
            "no ip interface found",
            "socket creation failed : address family not supported",
            "interface or hostname can't be empty",
            "failed to find a valid network interface",
        ),
        "The network card named in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is not on this machine, has no address, or none is usable.",
        _CARDS,
    ),
    Rule(
        "loopback-name",
        ("connectfullmesh failed*127.0.", "timed out connecting*127.0.", "connection refused, remote=[127.0."),
        "This machine's own name resolves to a loopback address (127.0.1.1 in /etc/hosts), and that is what it told the others.",
        "export GLOO_SOCKET_IFNAME=CARD   # on every machine, its own card (ip -br addr); or remove the 127.0.1.1 line of /etc/hosts",
    ),
    Rule(
        "port-busy",
        ("address already in use", "eaddrinuse", "only one usage of each socket address", "already in use, attempt"),
        "Another process listens on that port: another run, or what is left of one.",
        "ss -ltnp | grep :PORT   # says who; torchrun: another --master_port, or --standalone on one machine",
    ),
    Rule(
        "port-forbidden",
        ("server socket*errno: 13", "bind*permission denied", "eacces*permission denied"),
        "Ports below 1024 need root.",
        "--master_port 29500   # any from 1024 up",
    ),
    Rule(
        "address-not-here",
        ("cannot assign requested address", "requested address is not valid in its context", "system error: 10049"),
        "The first machine's address (--master_addr) is not an address of that machine, or not a valid one.",
        "ip -br addr   # on the first machine; use one of those for --master_addr",
    ),
    Rule(
        "name-unknown",
        (
            "name or service not known",
            "temporary failure in name resolution",
            "getaddrinfo failed",
            "nodename nor servname provided",
            "no address associated with hostname",
            "could not resolve hostname",
            "failed to look up the ip address for the hostname",
            "unable to resolve hostname",
            "no such host is known",
            "socket.gaierror",
            "gai error",
        ),
        "A host name cannot be turned into an address on this machine.",
        _LOOK_UP,
    ),
    Rule(
        "ssh",
        ("permission denied (publickey",
            "ssh: connect to host*connection refused", "host key verification failed", "connection closed by*port 22"),
        "The launcher's ssh was refused.",
        "ssh -o BatchMode=yes HOST true   # must work without a question: ssh-copy-id HOST, ssh-keyscan HOST >> ~/.ssh/known_hosts",
    ),
    Rule(
        "no-route",
        ("no route to host", "network is unreachable", "host is unreachable", "ehostunreach", "enetunreach"),
        "No way to that address: a firewall that rejects (also seen as this), a wrong network card, or a wrong address.",
        f"ip route get ADDRESS; ping -c1 ADDRESS   # wrong card: {_CARDS}\n{_FIREWALL}",
    ),
    Rule(
        "peer-lost",
        ("call to recv*failed", "call to send*failed", "socketprogress: connection closed"),
        "The connection to another process broke: that process ended, or its machine or link did.",
        _LOGS,
        order=FOLLOWS,
    ),
    Rule(
        "nccl-refused",
        ("nccl*connect*connection refused",),
        "NCCL chose that port itself, so --master_port is not at fault. The machine answered, but NCCL there no longer listens: its process ended or never began, a firewall rejects the ports that NCCL chooses, or NCCL took the wrong network card.",
        f"its log first: {_LOGS}\n{_FIREWALL}\nwrong card: {_CARDS}",
    ),
    Rule(
        "connection-refused",
        ("connection refused", "econnrefused", "target machine actively refused"),
        "The machine is there, but nothing listens on that port: the first machine was not started or has ended, or address or port are wrong.",
        "nc -zv ADDRESS PORT   # while the first machine (--node_rank 0) waits there; the same --master_addr and --master_port everywhere",
    ),
    Rule(
        "connect-timeout",
        ("client socket has timed out", "timed out connecting", "timed out while connecting"),
        _SILENCE,
        f"nc -zv ADDRESS PORT\n{_FIREWALL}",
        unmet=True,
    ),
    Rule(
        "connect-timeout",
        ("connection timed out", "etimedout", "operation timed out"),
        _SILENCE,
        f"nc -zv ADDRESS PORT\n{_FIREWALL}",
    ),
    Rule(
        "unreachable",
        ("failed to connect to any network address",),
        "None of the addresses of the first machine could be reached; the lines before say why.",
        "nc -zv ADDRESS PORT",
        order=UNNAMED,
        unmet=True,
    ),
)  # fmt: skip

PROGRAM = (
    Rule(
        "nccl-version",
        ("mismatched nccl version", "message truncated : received"),
        "The machines run different versions of NCCL (or two runs share a port).",
        'python -c "import torch; print(torch.__version__, torch.cuda.nccl.version())"   # on every machine; install the same torch',
    ),
    Rule(
        "library-mismatch",
        (
            "glibcxx_*not found",
            "glibc_*not found",
            "cxxabi_*not found",
            "undefined symbol",
            "cannot open shared object file",
            "in static tls block",
            "dll load failed",
        ),
        "Compiled libraries do not fit together: two sources (conda, pip, system) are mixed, or LD_LIBRARY_PATH brings another copy.",
        "unset LD_LIBRARY_PATH   # and try again; else a fresh environment: python -m venv env, pip install yolofleet",
    ),
    Rule(
        "module-missing",
        ("modulenotfounderror: ", "importerror: no module named"),
        "A package is missing in this environment: on this machine only, perhaps.",
        "pip install PACKAGE   # in the environment that runs: python -c 'import sys; print(sys.executable)'",
    ),
    Rule(
        "duplicate-gpu",
        ("duplicate gpu detected",),
        "Two processes use the same GPU; NCCL allows one each.",
        "as many processes as GPUs: --device 0,1 for --nproc_per_node 2; echo $CUDA_VISIBLE_DEVICES",
    ),
    Rule(
        "device-ordinal",
        ("invalid device ordinal",),
        "A GPU number that this process does not have: more processes than GPUs, or CUDA_VISIBLE_DEVICES hides some (they count from 0).",
        "nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES   # then --nproc_per_node or --device accordingly",
    ),
    Rule(
        "gpu-memory",
        (
            "cuda out of memory",
            "cuda error: out of memory",
            "cuda_error_out_of_memory",
            "cuda failure*out of memory",
            "outofmemoryerror",
            "error=2 : out of memory",
            "cuda runtime error (2)",
            "hip out of memory",
            "out of memory error on gpu",
            "oom when allocating",
            "cuda driver error: out of memory",
            "cublas_status_alloc_failed",
            "cudnn_status_alloc_failed",
        ),
        "A GPU's memory is full: a step needs more than is free, or another process holds some.",
        "nvidia-smi   # who uses it; --micro-batch N with half the number (the result stays the same), or a smaller --img",
    ),
    Rule(
        "cuda-assert",
        ("device-side assert triggered", "thread: [*assertion"),
        "A kernel got a wrong index: nearly always a class number in a label that is not below the number of classes.",
        "yolofleet data check DATA   # names such labels; else CUDA_LAUNCH_BLOCKING=1 names the operation",
    ),
    Rule(
        "cuda-illegal",
        (
            "illegal memory access",
            "misaligned address",
            "unspecified launch failure",
            "cublas_status_execution_failed",
            "cudnn_status_execution_failed",
            "cublas_status_not_initialized",
            "cudnn_status_not_initialized",
            "cudnn_status_internal_error",
            "cublas_status_internal_error",
            "unable to find an engine to execute",
            "an illegal instruction was encountered",
        ),
        "A CUDA kernel crashed: full GPU memory, libraries that do not fit, or a faulty GPU.",
        "CUDA_LAUNCH_BLOCKING=1, then the same command; nvidia-smi; with a smaller --micro-batch and --cudnn-benchmark off",
    ),
    Rule(
        "cuda-fork",
        ("cannot re-initialize cuda in forked subprocess",),
        "A loader process touched CUDA after a fork.",
        "torch.multiprocessing.set_start_method('spawn'), or keep CUDA out of the data set's code",
    ),
    Rule(
        "ddp-unused",
        ("expected to have finished reduction", "mark a variable ready only once", "were not used in producing loss", "which did not receive grad for rank"),
        "Some parameters got no gradient on a rank, and DistributedDataParallel waits for every one. (yolofleet's own trainer does not need them all.)",
        "DistributedDataParallel(..., find_unused_parameters=True), or freeze those parameters; TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
    ),
    Rule(
        "collective-mismatch",
        (
            "detected mismatch between collectives",
            "collectives differ in the following",
            "appears not to match",
            "ddp expects same model across all ranks",
            "op.preamble.length <= op.nbytes",
            "received data size doesn't match expected size",
            "has inconsistent*param",
        ),
        "The ranks did different things at the same moment: another model, data set or branch of the program.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the first difference; the same code, data and command on every machine",
    ),
    Rule(
        "too-many-files",
        ("too many open files", "received 0 items of ancdata", "[errno 24]"),
        "A process holds more files and shared tensors than it may.",
        "ulimit -n 65536   # before the start, in the same shell; or fewer --workers",
    ),
    Rule(
        "process-limit",
        ("can't start new thread", "pthread_create failed", "fork: retry", "blockingioerror: [errno 11]"),
        "This user or container may not start more processes or threads.",
        "ulimit -u; cat /sys/fs/cgroup/pids.max   # docker: --pids-limit -1; fewer --workers and --threads",
    ),
    Rule(
        "environment-missing",
        (
            "expected, but not set",
            "env:// rendezvous:",
            "keyerror: 'master_addr'",
            "keyerror: 'master_port'",
            "keyerror: 'rank'",
            "keyerror: 'local_rank'",
            "keyerror: 'world_size'",
        ),
        "The program was not started by a launcher: nobody set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
        "torchrun --nproc_per_node N train.py ...   # or: yolofleet train --device 0,1, which starts its own processes",
    ),
    Rule(
        "local-rank-argument",
        ("unrecognized arguments: --local", "unrecognized arguments*--local-rank", "unrecognized arguments*--local_rank", "no such option: --local"),
        "torch.distributed.launch gives --local-rank (before torch 2.0: --local_rank) to a program that does not know it.",
        "torchrun ... in place of python -m torch.distributed.launch ...",
    ),
    Rule(
        "arguments",
        ("error: unrecognized arguments", "error: the following arguments are required", "error: no such option"),
        "The program does not know an argument that it was given, or wants one more.",
        "the same command with --help",
    ),
    Rule(
        "command-missing",
        ("execve():", "command not found", "unable to find the specified executable", "executable file not found"),
        "A program is not there, or not in the PATH of a process that a scheduler or ssh started.",
        "which torchrun   # on that machine; activate the environment in the job script, or give the full path",
    ),
    Rule(
        "file-missing",
        ("can't open file", "filenotfounderror: "),
        "A file is not there: on this machine, or seen from the folder where the process was started.",
        "ls -l FILE   # on every machine; relative paths count from where the job starts",
    ),
    Rule(
        "no-process-group",
        ("default process group has not been initialized",),
        "The program expects several processes and was started as one.",
        "torchrun --nproc_per_node N train.py ...",
    ),
    Rule(
        "rank-invalid",
        ("invalid rank argument", "rank < size", "rank should be less than", "invalid world size",
            "already checked in",
            "mismatch in rank count", "world size was changed"),
        "Rank and number of processes do not fit: two machines with the same --node_rank, or different --nnodes.",
        "the same --nnodes, --master_addr and --master_port on every machine; --node_rank 0, 1, 2, ...; env | grep -e RANK -e WORLD_SIZE",
    ),
    Rule(
        "nccl-missing",
        ("distributed package doesn't have nccl",),
        "This torch has no NCCL (Windows, macOS, CPU builds).",
        "backend gloo; yolofleet chooses it by itself there",
    ),
    Rule(
        "no-libuv",
        ("without libuv support",),
        "torch for Windows lacks a part that torchrun asks for.",
        "set USE_LIBUV=0   # or: yolofleet train, or WSL2",
    ),
    Rule(
        "backend-device",
        ("no backend type associated with device type", "tensors must be cuda and dense"),
        "A tensor on the CPU was given to NCCL, or one on a GPU to a group without NCCL.",
        "init_process_group('cpu:gloo,cuda:nccl')",
    ),
    Rule(
        "main-guard",
        ("before the current process has finished its bootstrapping phase", "freeze_support()"),
        "A script starts processes while it is imported (Windows, macOS).",
        'put the start under: if __name__ == "__main__":',
    ),
    Rule(
        "ipc-isolated",
        ("error while attaching to shared memory segment", "cuda failure*invalid argument", "cudaipcopenmemhandle",
            "failed to open cuda ipc handle",
            "peer access is not supported", "could not open shared memory"),
        "Processes of one machine do not share /dev/shm or see each other's GPUs: separate containers, or a stale segment.",
        "one container for all processes of a machine, with --ipc=host; or NCCL_SHM_DISABLE=1 NCCL_P2P_DISABLE=1 (slower)",
    ),
    Rule(
        "time-limit",
        ("due to time limit", "timelimit reached"),
        "The job's time was up.",
        "sbatch --time ... --signal=USR1@120; yolofleet train --resume auto",
    ),
    Rule(
        "preempted",
        ("due to preemption", "due to node fail", "due to job requeue"),
        "The scheduler took the machine away.",
        "yolofleet train --resume auto   # sbatch --requeue does it by itself",
    ),
)  # fmt: skip

ENDS = (
    Rule(
        "killed",
        ("^killed$", ": line * killed ", "srun: error:*: killed"),
        "Ended by SIGKILL (exit code -9 or 137), which a program cannot see coming: most likely the kernel, because memory (RAM) ran out; else a person or scheduler.",
        "dmesg -T | grep -i oom; free -g   # fewer --workers, smaller --prefetch, --cache none; more memory for the job (--mem, docker -m)",
        order=ENDED,
    ),
    Rule(
        "segfault",
        ("segmentation fault", "fatal python error: segmentation", "access violation"),
        "A crash inside compiled code (exit code -11 or 139): libraries that do not fit together, or bad memory.",
        "PYTHONFAULTHANDLER=1, then the same command: shows where; a fresh environment with one torch",
        order=ENDED,
    ),
    Rule(
        "illegal-instruction",
        ("illegal instruction",),
        "A library was built for another CPU (exit code -4).",
        "lscpu | grep -i avx; pip install --force-reinstall PACKAGE",
        order=ENDED,
    ),
    Rule(
        "hangup",
        ("got signal: 1$", "received 1 death signal", "received sighup death signal", "received signals.sighup"),
        "The terminal or ssh session closed (SIGHUP) and took the run with it.",
        "tmux new -s train   # or: nohup COMMAND > train.log 2>&1 &",
        order=ENDED,
    ),
    Rule(
        "interrupted",
        ("keyboardinterrupt", "got signal: 2$", "received sigint death signal", "received 2 death signal", "received signals.sigint"),
        "Ctrl-C.",
        "yolofleet train --resume auto",
        level="note",
    ),
    Rule(
        "stopped",
        ("got signal: 15$", "received sigterm death signal", "received 15 death signal", "received signals.sigterm", "got termination signal", "*** job * cancelled", "*** step * cancelled", "srun: error:*: terminated"),
        "Asked to stop (SIGTERM): by a person, a scheduler or the launcher of another machine.",
        "sacct -j JOB --format=JobID,State,ExitCode,Reason   # under SLURM; yolofleet train --resume auto continues",
        order=UNNAMED,
        level="warn",
    ),
    Rule(
        "aborted",
        ("terminate called", "fatal python error: aborted", "aborted*(core dumped)", "by signal: aborted"),
        "A library gave up (SIGABRT, exit code -6); its last message before says why.",
        _LOGS,
        order=FOLLOWS,
    ),
    Rule(
        "loader-died",
        ("dataloader worker*exited unexpectedly", "pin memory thread exited unexpectedly", "dataloader timed out"),
        "A loader process ended without a word, most likely for want of memory (RAM or /dev/shm), or it waits for a slow disk.",
        "free -g; df -h /dev/shm   # once with --workers 0: the error then names itself",
        order=UNNAMED,
    ),
)  # fmt: skip

RENDEZVOUS = (
    Rule(
        "rendezvous-timeout",
        ("rendezvoustimeouterror", "waiting for clients", "members to join", "could not join the other ranks", "timed out waiting for clients"),
        "Not all machines or processes came: one was not started, cannot reach the first, or another number was asked for.",
        "the same --nnodes, --master_addr (--rdzv_endpoint) and --rdzv_id everywhere; nc -zv ADDRESS PORT from each of them",
        order=UNNAMED,
        unmet=True,
    ),
    Rule(
        "rendezvous-closed",
        ("rendezvousclosederror", "rendezvousgracefulexiterror"),
        "A machine came after the run had ended, or after another one had left it.",
        "start all machines again, with a new --rdzv_id",
        order=UNNAMED,
    ),
    Rule(
        "rendezvous-lost",
        ("rendezvousconnectionerror", "connection to the c10d store has failed", "connection to etcd has failed", "rendezvousstateerror"),
        "The meeting place on the first machine is gone or was never reached.",
        "is the first machine still running? nc -zv ADDRESS PORT",
        order=FOLLOWS,
        unmet=True,
    ),
    Rule(
        "store-timeout",
        ("wait timeout after",
            "timeout waiting for key", "diststoreerror", "socket timeout", "timed out waiting on barrier", "store->get(*wait timeout"),
        "A process waited for a word of another one that never came: that one died, or hangs before its first collective.",
        _LOGS,
        order=FOLLOWS,
        unmet=True,
    ),
    Rule(
        "peer-lost",
        (
            "connection closed by peer",
            "closed by remote peer",
            "connection reset by peer",
            "connection abort",
            "broken pipe",
            "remote process exited or there was a network error",
            "ncclremoteerror",
            "forcibly closed by the remote host",
            "connection was likely closed",
            "application timeout caused pair closure",
            "store->get(*got error",
            "tcpstore server has shut down",
            "should dump\" flag on tcpstore",
            "socket closed",
            "lost the other ranks in a collective",
            "connection closed. localrank",
            "socket recv failed while polling",
        ),
        "The connection to another process broke: that process ended, or its machine or link did. The first that failed says why.",
        _LOGS,
        order=FOLLOWS,
    ),
    Rule(
        "collective-timeout",
        (
            "watchdog caught collective operation timeout",
            "milliseconds before timing out",
            "recv operation to complete",
            "send operation to complete",
            "timed out in monitoredbarrier",
            "failed to pass monitoredbarrier",
            "watchdog got stuck",
            "heartbeat monitor timed out",
            "nccl operations have failed or timed out",
            "nccl communicator was aborted",
            "timeout at nccl work",
            "processgroupnccl's watchdog",
        ),
        "Some rank did not come to a collective in time: it hangs, died, is far slower (validation or a download on rank 0), or took another branch.",
        "which rank is silent? its log and nvidia-smi on its host. Slow, not dead: --timeout-s 1800. Torch programs: TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_DISTRIBUTED_DEBUG=DETAIL",
        order=FOLLOWS,
    ),
    Rule(
        NCCL_ERROR,
        ("unhandled system error", "ncclsystemerror", "unhandled cuda error", "ncclunhandledcudaerror", "ncclinternalerror", "ncclinvalidusage", "nccl error in", "internal error - please report"),
        "NCCL failed. A line with `NCCL WARN` would say what failed, but this log has none.",
        "NCCL_DEBUG=WARN, then the same command; in a container most often shared memory: docker run --ipc=host",
        order=UNNAMED,
    ),
    Rule(
        "worker-failed",
        ("its message says why", "srun: error:*exited with exit code",
            "container rank*status failed",
            "worker group failed",
            "torchelastic.worker.status.failed",
            "exited with non-zero status"),
        "A process ended with an error. If no finding above says which, its own log does.",
        _LOGS,
        order=FOLLOWS,
    ),
)  # fmt: skip

RULES = (*HARMLESS, *MACHINES, *NETWORK, *PROGRAM, *ENDS, *RENDEZVOUS)

# Findings that are not found by text; by their code.
PYTHON_ERROR = Rule(
    "python-error",
    (),
    "The program ended by this exception; the lines above it in the log say where.",
    _LOGS,
    order=ENDED,
)
OWN_ERROR = Rule("yolofleet-error", (), "yolofleet said so itself.", order=NAMED)
WORKER_FAILED = Rule(
    "worker-failed",
    (),
    "A process ended with an error. If no finding above says which, its own log does.",
    _LOGS,
    order=FOLLOWS,
)
ENDED_BY_OTHERS = Rule(
    "ended-by-others",
    (),
    "Ended by SIGTERM (exit code -15): the launcher ends the others when one has failed, or a scheduler stopped the job.",
    _LOGS,
    order=FOLLOWS,
)


def _of(code: str) -> Rule:
    return next(rule for rule in RULES if rule.code == code)


SIGNALS = {
    1: _of("hangup"),
    2: _of("interrupted"),
    4: _of("illegal-instruction"),
    6: _of("aborted"),
    7: _of("shm-full"),
    9: _of("killed"),
    11: _of("segfault"),
    15: ENDED_BY_OTHERS,
}
SIGNAL_NAMES = {"hup": 1, "int": 2, "ill": 4, "abrt": 6, "bus": 7, "kill": 9, "segv": 11, "term": 15}
