"""What a model writes in reply to a chat, cut into reasoning, answer and tool calls. Text only: no HTTP, no engine.

The interface is `parser.ReplyParser`, the parts that it returns (`parts`), the forms of families of models by their names
(`forms`), and the grammars that hold a reply to calls or to a schema (`grammar`).
"""
