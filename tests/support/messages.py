"""Messages of conversations, as chat templates take them."""


def user(content, **others):
    return {"role": "user", "content": content, **others}


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


def system(content, role="system"):
    return {"role": role, "content": content}
