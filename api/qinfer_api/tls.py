"""TLS files, read before anything is served, so that a wrong one is named at the start."""

import ssl
from pathlib import Path

from qinfer.errors import SettingsError


def read_certificate(section: str, certificate: str, key: str) -> tuple[bytes, bytes] | None:
    """Reads a certificate and its key, and checks that they belong together.

    Args:
        section: The section of the settings, in capitals: the errors name the variables `QINFER_<section>__TLS_…`.
        certificate: The path of the PEM certificate chain.
        key: The path of its PEM private key.

    Returns:
        Both, as in the files; `None` where neither is set.

    Raises:
        SettingsError: Only one of them is set, or they can't be read or used.
    """
    if not certificate and not key:
        return None
    for variable, path in (("TLS_CERTFILE", certificate), ("TLS_KEYFILE", key)):
        if not path:
            raise SettingsError(f"QINFER_{section}__{variable} is not set; TLS needs a certificate and its key")
    chain = read_tls_file(f"QINFER_{section}__TLS_CERTFILE", certificate)
    private = read_tls_file(f"QINFER_{section}__TLS_KEYFILE", key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # never asks for one
    except (OSError, ValueError):
        raise SettingsError(
            f"QINFER_{section}__TLS_CERTFILE={certificate} QINFER_{section}__TLS_KEYFILE={key}: not a PEM certificate "
            "and its key without a password"
        ) from None
    return chain, private


def read_tls_file(variable: str, path: str) -> bytes:
    """Reads a file that a setting names.

    Raises:
        SettingsError: It is not there, or can't be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError:
        raise SettingsError(f"{variable}={path}: there is no such file, or it can't be read") from None
