"""The file system of a folder."""

from pathlib import Path

from yolofleet.support.system.proc import network_disk

LINES = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 24 0:26 / /data rw shared:5 - nfs4 server:/export rw
31 24 0:27 / /data/fast\\040disk rw - xfs /dev/nvme0n1 rw
32 24 0:28 / /cloud rw master:1 - fuse.sshfs host:/ rw
33 24 0:29 / /cloud rw - ext4 /dev/vdb rw
"""


def test_the_deepest_mount_of_a_folder_decides(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(LINES)
    found = {
        folder: network_disk(Path(folder), tmp_path)
        for folder in ("/", "/home/me", "/data", "/data/set", "/data/fast disk/set", "/database", "/cloud/x")
    }
    # a later mount at the same point covers the earlier one
    assert found == {**dict.fromkeys(found, ""), "/data": "nfs4", "/data/set": "nfs4"}
    assert network_disk(Path("/data"), tmp_path / "none") == ""  # another system
