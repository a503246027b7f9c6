"""Checkpoints on disk: written so that a kill never loses the previous one, found, verified, retained, resumed."""

from skyrl_core.checkpoint.discovery import checkpoint_at, latest_checkpoint, list_checkpoints, read_manifest
from skyrl_core.checkpoint.manifest import CheckpointManifest
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.resume import ResumeDecision, RunIdentity, choose_resume
from skyrl_core.checkpoint.retention import apply_retention, clean_leftovers

__all__ = [
    "CheckpointManifest",
    "CheckpointWriter",
    "ResumeDecision",
    "RunIdentity",
    "apply_retention",
    "checkpoint_at",
    "choose_resume",
    "clean_leftovers",
    "latest_checkpoint",
    "list_checkpoints",
    "read_manifest",
]
