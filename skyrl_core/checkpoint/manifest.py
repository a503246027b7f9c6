"""What a checkpoint says about itself: its files with checksums, and from what run, data and code it came."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

from skyrl_core.data.digests import canonical_json, digest_of, parse_json
from skyrl_core.data.references import FileEntry
from skyrl_core.errors import CheckpointError, CorruptCheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The last file written into a checkpoint; a folder without it is no checkpoint.

    `files` lists everything but the manifest, paths relative to the checkpoint. `data_position` is the loader's state
    (counted in samples), valid for the dataset with `dataset_fingerprint` only. `config_digest` leaves out what may
    change between runs that continue each other (paths, loggers, limits). `created_at` is ISO 8601 in UTC.
    `algorithm_state` is what the algorithm carries from step to step (the adaptive KL coefficient).
    """

    step: int
    policy_version: int
    files: tuple[FileEntry, ...]
    config_digest: str
    dataset_fingerprint: str
    data_position: Mapping[str, Any]
    world_size: int
    code_version: str
    created_at: str
    run_name: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    algorithm_state: Mapping[str, float] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def content_digest(self) -> str:
        """Digest of the files alone: equal for two checkpoints that restore the same state."""
        return digest_of({entry.path: [entry.size, entry.sha256] for entry in self.files})


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The manifest as JSON. Raises TypeError when `data_position` or `metrics` hold what JSON cannot.

    `oldest_reader` is the lowest format version whose readers understand the file: they ignore fields they do not
    know. `sha256` covers all other fields.
    """
    content = {**asdict(manifest), "oldest_reader": 1}
    return canonical_json({**content, "sha256": digest_of(content)}, indent=1) + b"\n"


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """The manifest in `data`, which was read from the file `where`.

    Raises CorruptCheckpointError naming the file when it is torn or altered, CheckpointError when a newer version wrote
    it in a form that this one does not understand.
    """
    try:
        content = parse_json(data)
        checksum = content.pop("sha256")
        intact = digest_of(content) == checksum
        oldest_reader = int(content.pop("oldest_reader"))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{where} is torn or no manifest: {type(error).__name__}: {error}") from error
    if not intact:
        raise CorruptCheckpointError(f"{where} was altered: its checksum does not fit its content")
    if oldest_reader > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} was written in checkpoint format {content.get('format_version')} by skyrl-flows "
            f"{content.get('code_version')}; this version reads up to format {FORMAT_VERSION}: upgrade skyrl-flows"
        )
    known = {item.name for item in fields(CheckpointManifest)}
    try:
        files = tuple(FileEntry(**entry) for entry in content.pop("files"))
        manifest = CheckpointManifest(**{name: content[name] for name in known & content.keys()}, files=files)
    except (TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{where} lacks what a manifest must hold: {error}") from error
    for entry in files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts:
            raise CorruptCheckpointError(f"{where} names the file {entry.path!r}, which is outside the checkpoint")
    return manifest
