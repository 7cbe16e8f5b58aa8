"""Print what a vLLM wheel requires, one requirement a line, without torch and what comes with it.

Those are chosen by the Makefile's TORCH; the ones for pictures and sound, which the registry holds
for GPUs only, are not needed where a model reads text.
"""

import email
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}


def main() -> int:
    """Read the wheel that the command line names."""
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        wanted = marker is None or marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in LEFT_OUT:
            print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
