"""The API server of the cluster that we run in, or that KUBECONFIG names."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from kubernetes.aio import client, config

from shared.errors import ConfigError

TIMEOUT_S = 5.0  # of one call
MAX_REASON = 400  # characters

# What a call may end with while the API server is away, overloaded or being replaced, or while something before it answers in its place
# (ValueError: what came cannot be read). None of it is a reason to change anything.
UNREACHABLE = (client.ApiException, aiohttp.ClientError, TimeoutError, OSError, ValueError)


def in_words(error: BaseException) -> str:
    """In one line why a call failed. Of an answer what the API server says, not its headers, which the library puts before it."""
    text = f"{error.status} {error.reason}: {error.body or ''}" if isinstance(error, client.ApiException) else str(error)
    return " ".join(text.split())[:MAX_REASON] or type(error).__name__


@asynccontextmanager
async def kubernetes_api() -> AsyncIterator[client.ApiClient]:
    """Raises ConfigError when there is no cluster to talk to."""
    settings = client.Configuration()
    try:
        if kubeconfig := os.environ.get("KUBECONFIG"):
            await config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
        else:
            config.load_incluster_config(client_configuration=settings)
            settings.client_session_kwargs = {"trust_env": False}  # a proxy of the environment is for what is outside the cluster
    except config.ConfigException as error:
        raise ConfigError(f"no Kubernetes cluster: neither a pod's service account nor KUBECONFIG: {error}") from error
    async with client.ApiClient(settings) as api:
        yield api
