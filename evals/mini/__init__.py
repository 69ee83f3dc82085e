"""MergeBench in miniature: a small base and ten specialists, trained, merged and scored here.

data    the tasks and their items
model   presets, tokenizer, Llama and one training
train   a base, and a specialist for each task
score   right answers of a model, in batches
study   merges, bases and stores of the specialists
"""
