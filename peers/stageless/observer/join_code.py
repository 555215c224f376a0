"""A join link as a QR code, for people who read a run's page on another computer than the one that joins."""

from __future__ import annotations

import io

QUIET_ZONE = 4
"""Empty modules around the code, which ISO/IEC 18004 requires."""


def draw_code(link: str) -> bytes | None:
    """Return the QR code as SVG, dark on white in light and dark pages alike. None without segno (the extra
    `page`), or if the link is too long for a code."""
    try:
        import segno
    except ModuleNotFoundError:
        return None
    try:
        code = segno.make(link, error="m", micro=False)
    except segno.DataOverflowError:
        return None
    picture = io.BytesIO()
    code.save(picture, kind="svg", border=QUIET_ZONE, light="#fff", dark="#000", omitsize=True, xmldecl=False)
    return picture.getvalue()
