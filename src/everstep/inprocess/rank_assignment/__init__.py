"""Who runs the function in the next iteration, and as which rank: NVRx's pipeline of assignments and filters.

Compose them with `everstep.inprocess.Compose`, filters first: what is listed last runs first. Where an agent fills
every gap with a spare nobody is ever lost, and a pipeline only chooses who is active.
"""

from everstep.inprocess.rank_assignment.context import RankAssignment as RankAssignment
from everstep.inprocess.rank_assignment.context import RankAssignmentCtx as RankAssignmentCtx
from everstep.inprocess.rank_assignment.context import RankDiscarded as RankDiscarded
from everstep.inprocess.rank_assignment.context import RankFilter as RankFilter
from everstep.inprocess.rank_assignment.pipeline import ActivateAllRanks as ActivateAllRanks
from everstep.inprocess.rank_assignment.pipeline import ActiveWorldSizeDivisibleBy as ActiveWorldSizeDivisibleBy
from everstep.inprocess.rank_assignment.pipeline import FillGaps as FillGaps
from everstep.inprocess.rank_assignment.pipeline import FilterCountGroupedByKey as FilterCountGroupedByKey
from everstep.inprocess.rank_assignment.pipeline import MaxActiveWorldSize as MaxActiveWorldSize
from everstep.inprocess.rank_assignment.pipeline import ShiftRanks as ShiftRanks
from everstep.inprocess.rank_assignment.tree import Layer as Layer
from everstep.inprocess.rank_assignment.tree import LayerFlag as LayerFlag
from everstep.inprocess.rank_assignment.tree import Tree as Tree
