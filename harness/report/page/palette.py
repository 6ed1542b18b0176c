"""Colours of the page, and which of them are laid on which: contrast is computed from here."""

from __future__ import annotations

LIGHT = {
    "bg": "#fbfbfa",
    "panel": "#ffffff",
    "head": "#f1f2f1",
    "line": "#d5d9dc",
    "text": "#1c2227",
    "muted": "#56606a",
    "accent": "#0b5394",
    "pass": "#14633a",
    "pass-bg": "#e9f5ed",
    "fail": "#a01218",
    "fail-bg": "#fce6e6",
    "error": "#6d1f8f",
    "error-bg": "#f4e8f9",
    "refused": "#6e4a00",
    "refused-bg": "#fbf1d6",
    "mark-1": "#0b5394",
    "mark-2": "#a3540a",
    "mark-3": "#17704a",
    "mark-4": "#7a3c9c",
    "mark-5": "#8a5a00",
    "mark-6": "#ab2f6b",
    "fill": "#7aa6cf",
    "fill-soft": "#dbe7f2",
}

DARK = {
    "bg": "#14181c",
    "panel": "#1a1f24",
    "head": "#232a30",
    "line": "#39424b",
    "text": "#e3e7ea",
    "muted": "#a3aeb8",
    "accent": "#7cb8f0",
    "pass": "#83d8a3",
    "pass-bg": "#16301f",
    "fail": "#ff9a97",
    "fail-bg": "#421b1d",
    "error": "#dca6f5",
    "error-bg": "#352040",
    "refused": "#ecc66b",
    "refused-bg": "#362c12",
    "mark-1": "#7cb8f0",
    "mark-2": "#f0a868",
    "mark-3": "#74cfa0",
    "mark-4": "#cda1ec",
    "mark-5": "#dcc061",
    "mark-6": "#f193bd",
    "fill": "#4f7ea8",
    "fill-soft": "#26394b",
}

MARKS = 6
"""How many colours tell requests and series apart, as `mark-1` and so on."""

SURFACES = ("bg", "panel", "head")
TEXTS = ("text", "muted", "accent", "pass", "fail", "error", "refused", *(f"mark-{i + 1}" for i in range(MARKS)))

PAIRS = (
    *((text, surface) for text in TEXTS for surface in SURFACES),
    *((status, f"{status}-bg") for status in ("pass", "fail", "error", "refused")),
    *(("text", f"{status}-bg") for status in ("pass", "fail", "error", "refused")),
    *(("muted", f"{status}-bg") for status in ("pass", "fail", "error", "refused")),
    ("text", "fill-soft"),
    ("muted", "fill-soft"),
)
"""(text, what is behind it)."""


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two `#rrggbb` colours, 1 to 21."""
    first, second = sorted((_luminance(one), _luminance(other)))
    return (second + 0.05) / (first + 0.05)


def css() -> str:
    """Both palettes as custom properties: the system decides unless the page was told; paper is light."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in palette.items()) for palette in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme='light']) {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme='dark'] {{ color-scheme: dark; {dark} }}\n"
        f"@media print {{ :root:root[data-theme], :root:root:not([data-theme='none']) "
        f"{{ color-scheme: light; {light} }} }}\n"
    )


def _luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
