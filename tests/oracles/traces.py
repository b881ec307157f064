"""A replay of a trace's rows, and the boundaries that a block manager published."""

import collections


class Listener:
    """Collects the (request, boundary) pairs that a state block manager publishes."""

    def __init__(self, states):
        self.heard, publish, commit = [], states.publish, states.commit

        def published(request, tokens, **options):
            new = publish(request, tokens, **options)
            if new:
                self.heard.append((request, new))
            return new

        def committed(request, tokens, computed):
            boundary = commit(request, tokens, computed)
            if boundary:
                self.heard.append((request, boundary))
            return boundary

        states.publish, states.commit = published, committed


def replay(rows, block_size):
    """Follows every request through its rows, and returns how many of its tokens have states in the end."""
    computed, columns = {}, collections.defaultdict(dict)
    for row in rows:
        if row.enters:
            computed[row.request], columns[row.request] = row.computed, {}
        columns[row.request].update(row.columns)
        if row.gone:
            continue
        assert row.computed == computed[row.request]
        certain = row.computed + row.scheduled - row.drafts
        assert row.accepted <= row.proposed <= row.drafts
        computed[row.request] = after = certain + row.accepted
        passed = [end for end in range(certain, after + 1) if end % block_size == 0]
        assert row.saved == max(passed, default=0)
        if row.saved:
            assert row.saved // block_size - 1 in columns[row.request]
        assert row.published in (0, row.saved)
    return computed
