"""Drafters with closed-form drafts, one file per method, in the layouts that public engines load."""
