"""The page that a browser shows at the server's address: a chat, and a picture of the cache. It is one file."""

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mamba_align_jax.serve.api.service import Service


async def show_page(service: Service, request: Request) -> Response:
    """Returns the page. Its headers let it run only its own script and style, and call only its own server."""
    html = resources.files(__name__).joinpath("index.html").read_text("utf-8")
    allowed = "; ".join(f"{kind}-src {_digest(html, tag)}" for kind, tag in (("script", "script"), ("style", "style")))
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {
        "content-security-policy": f"default-src 'none'; {allowed}; {rest}",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _digest(html: str, tag: str) -> str:
    """Returns the hash by which a Content-Security-Policy allows the page's only element of this kind."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
