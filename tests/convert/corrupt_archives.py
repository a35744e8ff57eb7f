"""PyTorch archives that are none, or hold more than weights: name -> (how, what is said of it)."""

import pickle
import zipfile
from pathlib import Path

from tests.convert.spoiling import WEIGHTS, cut_file


class RunsCode:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("was_executed"),))


def torch_archive(write):
    def spoil(folder):
        (folder / "head" / WEIGHTS).unlink()
        write(folder / "head" / "pytorch_model.bin")

    return spoil


def zipped(entries, compression=zipfile.ZIP_STORED):
    def write(path):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)

    return torch_archive(write)


TORCH = {
    "pickle with code": (
        zipped({"archive/data.pkl": pickle.dumps(RunsCode()), "archive/version": "3\n"}),
        "pytorch_model.bin holds more or less than tensors",
    ),
    "bare pickle with code": (
        torch_archive(lambda path: path.write_bytes(pickle.dumps(RunsCode()))),
        "pytorch_model.bin is not a whole PyTorch archive",
    ),
    "zip bomb": (
        zipped({"archive/data.pkl": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED),
        "pytorch_model.bin would unpack to more than its size",
    ),
    "compressed entries": (
        zipped({"a/data.pkl": bytes(range(250))}, zipfile.ZIP_LZMA),
        "entry 'a/data.pkl' is compressed",
    ),
    "path tricks": (
        zipped({"archive/../../escaped": b"x"}),
        "entry 'archive/../../escaped' leads out of the archive",
    ),
    "absolute path": (zipped({"/escaped": b"x"}), "entry '/escaped' leads out of the archive"),
    "archive cut": (
        lambda folder: (
            zipped({"archive/data.pkl": b"x" * 500})(folder),
            cut_file("head/pytorch_model.bin", 300)(folder),
        ),
        "pytorch_model.bin is not a whole PyTorch archive",
    ),
    "archive without tensors": (zipped({"readme": b"x"}), "pytorch_model.bin holds more or less"),
}
