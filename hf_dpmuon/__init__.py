"""Differentially private fine-tuning of pretrained vision transformers with DP-Muon."""
