"""Makes format_1.zip, the store that every later version must go on reading. Run once, with the version that wrote it: 0.1.0."""

import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from conftest import make  # noqa: E402

import trajstore  # noqa: E402


def main() -> None:
    """Three trajectories in two segments, one of which was deleted."""
    with tempfile.TemporaryDirectory() as folder:
        with trajstore.open(Path(folder) / "store") as store:
            store.extend([make(seed=1, image=40), make(seed=2, extra=2), make(seed=3, image=40, chunk=4)])
            store.flush()
            store.delete([1])
        (Path(folder) / "store" / ".lock").unlink()
        shutil.make_archive(str(HERE / "format_1"), "zip", Path(folder) / "store")


if __name__ == "__main__":
    main()
