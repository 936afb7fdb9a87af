"""Connections to object storage: endpoint, credentials, patience. Called by shared/bucket.py only.

The only modules that use obstore are these two (ranged reads 4-30 times as fast as s3fs, two wheels instead of twenty;
not safe across a fork, and nothing here forks).
"""

from __future__ import annotations

import functools
import re
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from datetime import timedelta
from pathlib import Path
from typing import Any

from shared.errors import ConfigRefused, StorageRefused

# Kind of storage -> the variables that name its endpoint, the usual one last.
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"), "gs": ("GOOGLE_BASE_URL",)}
HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
# Any of these says where credentials come from; without one the library asks the cloud machine it runs on.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Until storage has answered once, a wrong endpoint must not cost minutes.
_FIRST_RETRIES = 2
_RETRIES = 10


def short(text: str) -> str:
    """A server's answer in one line: its code and sentence instead of its XML."""
    code, message = re.search(r"<Code>(.*?)</Code>", text), re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if code:
        return " ".join(f"{code[1]}: {message[1] if message else ''}".split())
    return " ".join(text.split())[:300]


def obstore() -> Any:
    """The library. Raises ConfigRefused when it is not installed."""
    try:
        import obstore as library
        import obstore.exceptions
    except ImportError as error:
        raise ConfigRefused("stores in buckets need one more library: pip install 'dflash-offline[s3]'") from error
    return library


@functools.lru_cache(maxsize=32)
def clients(
    scheme: str, bucket: str, prefix: str, endpoint: str, environment: tuple[tuple[str, str], ...]
) -> tuple[Any, Any]:
    """A client for the first answer and a patient one; both keep their connections, so they are made once."""
    obstore()
    from obstore.store import GCSStore, S3Store

    if endpoint and not re.match(r"https?://[^/]", endpoint):  # the library would panic
        raise StorageRefused(
            f"{scheme}://{bucket} cannot be reached: the endpoint {endpoint!r} is no address; set "
            f"{ENDPOINTS[scheme][-1]} to http://HOST:PORT or https://HOST"
        )

    known = dict(environment)
    config: dict[str, Any] = {}
    if scheme == "s3" and not any(known.get(name) for name in _CREDENTIALS):
        config = _shared_credentials(known)
        if not config and endpoint:
            raise StorageRefused(f"no credentials for s3://{bucket} at {endpoint}; {HINTS['s3']}")
    if scheme == "s3" and endpoint:
        config["endpoint"] = endpoint
    # An endpoint that says http:// means it; every other is spoken to through TLS only.
    options = {"timeout": "60s", "connect_timeout": "5s", "allow_http": endpoint.startswith("http://")}
    attempts = known.get("AWS_MAX_ATTEMPTS", "")
    retries = max(int(attempts) - 1, 0) if attempts.isdigit() else _RETRIES

    def client(most: int) -> Any:
        kind: Any = S3Store if scheme == "s3" else GCSStore
        retry = {"max_retries": min(most, retries), "retry_timeout": timedelta(minutes=3)}
        return kind(bucket, prefix=prefix or None, config=config, client_options=options, retry_config=retry)

    try:
        return client(_FIRST_RETRIES), client(retries)
    except (ValueError, obstore().exceptions.BaseError) as error:
        text = short(str(error).split("\n\nDebug source", maxsplit=1)[0])
        raise StorageRefused(
            f"{scheme}://{bucket} cannot be used with these settings: {text}; {HINTS[scheme]}"
        ) from error


def _shared_credentials(environment: dict[str, str]) -> dict[str, Any]:
    """Keys of the profile in ~/.aws/credentials, which every other tool for S3 reads and the library does not."""
    path = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except (OSError, ValueError, ConfigParserError):
        return {}
    profile = environment.get("AWS_PROFILE", "default")
    if not parser.has_option(profile, "aws_access_key_id"):
        return {}
    section = parser[profile]
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    names["aws_session_token"] = "session_token"
    return {ours: section[theirs] for theirs, ours in names.items() if theirs in section}
