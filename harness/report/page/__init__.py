"""`draftproof report`: one HTML page from the files of any run. A panel is a function from what was read to a section;
to add one, copy the nearest file and add it to `PANELS`."""

from harness.report.page.inputs import read
from harness.report.page.page import page

__all__ = ["page", "read"]
