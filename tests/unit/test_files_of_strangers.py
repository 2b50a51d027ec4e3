"""Every file that somebody else may have made is opened in one place: regular, of bounded size, without waiting.

Add a line to ``MAY_OPEN`` only for a file that this program has made itself, or that the kernel provides.
"""

from __future__ import annotations

import ast
from pathlib import Path

import yolofleet

PACKAGE = Path(yolofleet.__file__).parent

# "module:function" -> why it may open a file without yolofleet.storage.foreign
MAY_OPEN = {
    **dict.fromkeys(
        ("cli/api.py:_results", "measure/selftest/checks.py:read", "fleet/launch/schedulers/ray_job.py:_rank", "fleet/launch/run_on_hosts.py:run_on_hosts",
         "cli/bench.py:measure"),
        "results.json, which a run has just written or we have just fetched",
    ),
    **dict.fromkeys(
        ("cli/app.py:_open_closed_streams", "cli/app.py:_output_fault", "fleet/hosts/host_agent.py:main",
         "fleet/launch/detached/standby.py:leave_session", "runs/loggers/child.py:main"),
        "os.devnull",
    ),
    **dict.fromkeys(
        ("families/darknet/weights_file.py:check", "families/darknet/weights_file.py:dump", "families/weights/format.py:write",
         "families/ppyoloe/pdparams_file.py:dump", "inference/export/ncnn.py:write", "inference/export/onnx.py:model_of", "inference/export/onnx.py:write",
         "inference/export/quantize.py:quantized"),
        "a file that this process writes, under a temporary name",
    ),
    "measure/trainings.py:started_training": "the log of a training in a folder that we have just made",
    "measure/steps.py:checkpoint_cost": "a checkpoint that it has just written, in our temporary folder",
    **dict.fromkeys(
        ("data/input/entryfile.py:reopen", "data/input/entryfile.py:open_shared", "data/input/entryfile.py:sweep"),
        "files of our cache folder, and of the folder of --stage",
    ),
    **dict.fromkeys(
        ("data/datasets/convert.py:write", "data/datasets/writers.py:write_lines",
         "data/datasets/shapes.py:make_shapes", "data/datasets/writers.py:write_coco", "data/datasets/writers.py:_write"),
        "new files in a folder that we have just made",
    ),
    **dict.fromkeys(
        ("data/datasets/pack.py:add", "data/datasets/combine.py:_difference", "data/datasets/huggingface.py:run", "data/datasets/huggingface.py:_parquet"),
        "new files in a folder that we have just made",
    ),
    **dict.fromkeys(
        ("data/datasets/archive.py:_write_all", "data/datasets/archive.py:_tar_members", "data/datasets/arrayfile.py:read_arrays"),
        "an archive that we have downloaded, its members in a new folder, and arrays of our cache folder",
    ),
    "data/datasets/writers.py:_place": "copies an image that the index has opened; the copy is new",
    "data/datasets/built_in.py:copied_from": "a description that comes with this package",
    "fleet/doctor/findings.py:load_table": "a table that comes with this package",
    "runs/report/page.py:page_texts": "the template, style and script that come with this package",
    "fleet/doctor/machine_facts.py:package_sha256": "the sources of this package",
    "support/system/proc.py:text_of": "files of the kernel in /proc and /sys",
    **dict.fromkeys(("fleet/hosts/requests.py:packed", "fleet/hosts/requests.py:take"), "an archive in memory"),
    "fleet/launch/local.py:show": "a pipe that this process has made",
    "fleet/launch/folders.py:_claim_on": "a new file with a random name",
    "fleet/hosts/remote.py:login": "opens a connection, not a file",
    "fleet/launch/returns.py:_log_in": "the same",
    "runs/checkpoint/restart_store.py:__init__": "files in memory of the launcher, which named them",
    "training/parallel/torchrun_agent.py:_make_socket_folder": "folders in the temporary folder of yolofleet itself",
    "inference/predict/frames.py:video_frames": "OpenCV opens videos by name; _check_regular looks first",
}  # fmt: skip


def opens(call: ast.Call) -> bool:
    """Whether it opens a path: open(), Path.open, read_text, write_bytes, np.fromfile, os.open and the like."""
    words = ast.unparse(call.func)
    last = words.rpartition(".")[2]
    named = {
        "read_text", "read_bytes", "write_text", "write_bytes", "fromfile", "memmap", "loadtxt", "genfromtxt",
        "imread", "imreadmulti", "FileIO", "safe_open", "load_file", "copyfile",
    }  # fmt: skip
    if words.startswith("webbrowser.") or (isinstance(call.func, ast.Name) and call.func.id in OWN):
        return False
    return (
        last in named
        or last == "open"
        or words in ("np.load", "torch.load", "cv2.VideoCapture", "io.open_code")
    )


OWN = {"write_text", "write_bytes"}  # of storage/atomic.py, imported by name


def found() -> dict[str, str]:
    """ "module:function" -> the first such call in it, of all modules outside of files/."""
    sites: dict[str, str] = {}

    def walk(node: ast.AST, module: str, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
            if isinstance(child, ast.Call) and opens(child):
                sites.setdefault(f"{module}:{inner}", f"line {child.lineno}: {ast.unparse(child)[:80]}")
            walk(child, module, inner)

    for file in sorted(PACKAGE.rglob("*.py")):
        module = file.relative_to(PACKAGE).as_posix()
        if not module.startswith("storage/"):
            walk(ast.parse(file.read_text(encoding="utf-8")), module, "")
    return sites


def test_files_of_strangers_are_opened_in_one_place() -> None:
    strays = {site: call for site, call in found().items() if site not in MAY_OPEN}
    assert not strays, "use yolofleet.storage.foreign:\n" + "\n".join(map(" ".join, strays.items()))


def test_no_exception_outlives_its_reason() -> None:
    assert not MAY_OPEN.keys() - found().keys()
