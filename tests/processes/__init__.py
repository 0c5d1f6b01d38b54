"""Tests that start programs or servers of their own, on this machine: nothing from the network."""
