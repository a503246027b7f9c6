"""Thin Prefect tasks around skyrl_core. Importing this package is cheap; its modules import Prefect."""
