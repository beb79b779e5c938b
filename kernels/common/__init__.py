"""Pieces shared by the operations of this folder."""
