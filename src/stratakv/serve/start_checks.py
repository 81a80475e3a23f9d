"""What can be refused before torch is loaded, which takes seconds: paths, keys, URLs, the address.

Owns nothing but the order of these checks; each is its owner's. Must not import torch.
"""

from pathlib import Path

from stratakv.core.choices import check_model_directory
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError
from stratakv.engine.huggingface.lora_config import FILE
from stratakv.serve.api_keys import api_keys
from stratakv.serve.sockets import bound_socket
from stratakv.serve.tls import tls_files
from stratakv.storage.registry import plugin_schemes
from stratakv.storage.store_key import read_key
from stratakv.storage.urls import check_roots, parse_storage_url


def check_start(model: Path, engine: EngineConfig, server: ServerConfig) -> None:
    """ConfigError for what a server could not be started with."""
    check_model_directory("MODEL", model)
    api_keys(server)
    tls_files(server)
    bound_socket(server.host, server.port).close()
    check_roots(engine.storage_root)
    if engine.storage_key_file is not None:
        read_key(engine.storage_key_file)
    if engine.storage is not None:
        parse_storage_url(engine.storage, plugin_schemes())
    check_names(model, engine, server)
    for name, directory in engine.adapters().items():
        if not (directory / FILE).is_file():
            raise ConfigError(
                f"--lora {name}={directory}: allowed is a directory with a PEFT {FILE}"
            )


def check_names(model: Path, engine: EngineConfig, server: ServerConfig) -> None:
    """ConfigError for an adapter with the model's name."""
    name = server.served_model_name or model.resolve().name
    if name in engine.adapters():
        raise ConfigError(
            f"--lora {name}={engine.adapters()[name]}: the model has this name; allowed is another"
        )
