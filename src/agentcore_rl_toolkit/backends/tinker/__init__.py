"""Tinker: conversion to its data, and a small training loop over its API."""
