"""Configurations as a command line composes them."""

from hydra import compose, initialize_config_dir

from lightning_pipeoffload.cli.configuration import configuration_directory


def composed(name, *overrides):
    with initialize_config_dir(str(configuration_directory()), version_base=None):
        return compose(name, overrides=list(overrides))
