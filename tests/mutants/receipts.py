"""Known mistakes in receipts and the guard."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "headers-are-no-subjects",
        "a kernel's header may change after green",
        "tests/guard/test_changed_files.py::test_every_file_is_a_subject_whatever_its_suffix",
        "receipts/subjects.py",
        "            yield name\n",
        '            if not name.endswith(".hpp"):\n                yield name\n',
    ),
    Mutant(
        "settings-not-bound",
        "a variable that chooses other machine code is no matter",
        "tests/guard/test_kernels.py::test_the_rerun_has_the_settings_of_the_run",
        "receipts/environment.py",
        '"matmul_precision", "settings", *KERNELS)',
        '"matmul_precision", *KERNELS)',
    ),
)
