"""Whether the model and data set hub answers, found out at once instead of after the client's long row of retries."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request


def hub_reachable(timeout_s: float = 5.0) -> bool:
    """Ask the hub that `huggingface_hub` is set up for, once. False without network and in its offline mode."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True  # it answered; what it said is for the real request to handle
    except urllib.error.URLError as exc:
        return isinstance(exc.reason, ssl.SSLError)  # certificates are the client's matter
    except OSError:
        return False
    return True
