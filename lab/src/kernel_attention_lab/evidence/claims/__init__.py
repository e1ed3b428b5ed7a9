"""The ledger of the papers' claims: what each says, how it is tested, and the verdict that follows."""

from kernel_attention_lab.evidence.claims.claim import Claim, Document, read_documents
from kernel_attention_lab.evidence.claims.ledger import VERDICTS, Judgement, claim_observations, judge

__all__ = ["VERDICTS", "Claim", "Document", "Judgement", "claim_observations", "judge", "read_documents"]
